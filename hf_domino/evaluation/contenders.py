"""Loading what a benchmark compares, from the command line's words."""

import argparse
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_domino.drafter.modeling_domino import DominoDraftModel

from .methods import Contenders


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments that `load_contenders` reads."""
    group = parser.add_argument_group("models")
    group.add_argument("--model", help="target: folder or Hub id; without it, the pair that comes with the package")
    group.add_argument("--drafter", help="Domino drafter for it: folder or Hub id")
    group.add_argument("--drafters", nargs="*", default=[], metavar="LABEL=PATH",
                       help="further drafters, for methods such as domino:LABEL")
    group.add_argument("--assistant", help="a small ordinary model, for the method `assisted`")
    group.add_argument("--dtype", default="auto", help="auto, float32, bfloat16, float16")
    group.add_argument("--device", default="cpu", help="cpu, cuda, mps, ...")
    group.add_argument("--threads", type=int, help="CPU threads of torch (default: torch's own choice)")


def load_contenders(arguments: argparse.Namespace) -> Contenders:
    """Loads target, tokenizer and drafters.

    Raises:
        ValueError: a target without a drafter or the reverse, or a --drafters entry that is no LABEL=PATH.
    """
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    options: dict[str, Any] = {
        "dtype": arguments.dtype if arguments.dtype == "auto" else getattr(torch, arguments.dtype)
    }
    labelled = dict(entry.partition("=")[::2] for entry in arguments.drafters)
    if not all(label and path for label, path in labelled.items()):
        raise ValueError(f"--drafters takes LABEL=PATH entries, got {' '.join(arguments.drafters)}.")
    if arguments.model is None:
        if arguments.drafter or labelled or arguments.assistant:
            raise ValueError("--drafter, --drafters and --assistant need the --model that they were made for.")
        from hf_domino.demo import load_default_pair

        model, tokenizer, drafter = load_default_pair(**options)
        model, drafters = model.to(arguments.device), {"": drafter.to(arguments.device)}
        return Contenders(model.eval(), tokenizer, drafters)
    if arguments.drafter is None and not labelled:
        raise ValueError("--model needs a --drafter (or --drafters LABEL=PATH ...).")
    model = AutoModelForCausalLM.from_pretrained(arguments.model, **options).to(arguments.device).eval()
    options["dtype"] = model.dtype
    paths = {"": arguments.drafter, **labelled} if arguments.drafter else labelled
    return Contenders(
        model,
        AutoTokenizer.from_pretrained(arguments.model),
        {label: DominoDraftModel.from_pretrained(path, **options).to(model.device).eval()
         for label, path in paths.items()},
        AutoModelForCausalLM.from_pretrained(arguments.assistant, **options).to(model.device).eval()
        if arguments.assistant else None,
    )
