"""Loading what a benchmark compares, from the command line's words."""

import argparse

import torch
from transformers import AutoModelForCausalLM

from hf_domino.demo import load_default_pair
from hf_domino.drafter.modeling_domino import DominoDraftModel

from .methods import Contenders


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments that `load_contenders` reads."""
    group = parser.add_argument_group("models")
    group.add_argument("--model", help="target: folder or Hub id (default: the one the project ships a drafter for)")
    group.add_argument("--drafter", help="Domino drafter for it: folder or Hub id (default: the one shipped)")
    group.add_argument(
        "--drafters",
        nargs="*",
        default=[],
        metavar="LABEL=PATH",
        help="further drafters, for methods such as domino:LABEL",
    )
    group.add_argument("--assistant", help="a small ordinary model, for the method `assisted`")
    group.add_argument("--dtype", default="bfloat16", help="float32, bfloat16 or float16")
    group.add_argument("--device", default="cpu", help="cpu, cuda, mps, ...")
    group.add_argument("--threads", type=int, help="CPU threads of torch (default: torch's own choice)")


def load_contenders(arguments: argparse.Namespace) -> Contenders:
    """Loads target, tokenizer and drafters, as a user of `load_default_pair` gets them.

    Raises:
        ValueError: a target without a drafter, or a --drafters entry that is no LABEL=PATH.
    """
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    labelled = dict(entry.partition("=")[::2] for entry in arguments.drafters)
    if not all(label and path for label, path in labelled.items()):
        raise ValueError(f"--drafters takes LABEL=PATH entries, got {' '.join(arguments.drafters)}.")
    if arguments.model is not None and arguments.drafter is None:
        raise ValueError("--model needs a --drafter that was made for it.")
    dtype = getattr(torch, arguments.dtype, None)
    if not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise ValueError(f"--dtype is float32, bfloat16 or float16, got {arguments.dtype!r}.")
    model, tokenizer, drafter = load_default_pair(dtype, arguments.model, arguments.drafter)
    model = model.to(arguments.device).eval()
    drafters = {"": drafter} | {
        label: DominoDraftModel.from_pretrained(path, dtype=drafter.dtype) for label, path in labelled.items()
    }
    assistant = None
    if arguments.assistant:
        assistant = AutoModelForCausalLM.from_pretrained(arguments.assistant, dtype=dtype).to(arguments.device).eval()
    drafters = {label: drafter.to(arguments.device).eval() for label, drafter in drafters.items()}
    return Contenders(model, tokenizer, drafters, assistant)
