"""Loading the target that training works for."""

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase


def load_target(name: str | None, dtype: str | torch.dtype) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A target and its tokenizer, frozen.

    Args:
        name: path or Hub id; `None` for the embedded default.
        dtype: a torch dtype or its name.

    Raises:
        ValueError: there is no such dtype.
        ImportError: the default target is wanted and its package is not installed.
    """
    if isinstance(dtype, str):
        found = getattr(torch, dtype, None)
        if not isinstance(found, torch.dtype):
            raise ValueError(f"There is no dtype {dtype!r}; bfloat16 and float32 are the usual ones.")
        dtype = found
    if name is None:
        from hf_domino.demo import load_default_target

        target, tokenizer = load_default_target(dtype)
    else:
        tokenizer = AutoTokenizer.from_pretrained(name)
        target = AutoModelForCausalLM.from_pretrained(name, dtype=dtype)
    return target.eval().requires_grad_(False), tokenizer
