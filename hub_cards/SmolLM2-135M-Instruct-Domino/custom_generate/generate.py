"""`model.generate(**inputs, custom_generate=<this repo>, trust_remote_code=True)`: fetches the drafter by itself."""

import functools
import re
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModel, PreTrainedModel

DRAFTER = "hf-domino/SmolLM2-135M-Instruct-Domino"


def generate(model: PreTrainedModel, assistant_model: PreTrainedModel | str | None = None, **kwargs: Any) -> Any:
    """`model.generate(**kwargs)` with this repo's drafter.

    Args:
        model: the target that the drafter was trained for.
        assistant_model: another drafter, or the name or folder of one.
        kwargs: any argument of `generate`.
    """
    if assistant_model is None or isinstance(assistant_model, str):
        assistant_model = _drafter(assistant_model or DRAFTER, model.dtype, model.device)
    return model.generate(assistant_model=assistant_model, **kwargs)


@functools.lru_cache(maxsize=2)
def _drafter(name: str, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    # transformers keeps the code of a Hub repo in a folder named after its commit: take the weights of that commit.
    commit = Path(__file__).parents[1].name
    revision = commit if name == DRAFTER and re.fullmatch("[0-9a-f]{40}", commit) else None
    drafter = AutoModel.from_pretrained(name, revision=revision, dtype=dtype, trust_remote_code=True)
    return drafter.to(device)
