"""A staged drafter at work: loaded as a user would load it, drafting for its target."""

from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PreTrainedModel

from ..drafter.modeling_domino import DominoDraftModel


@dataclass(frozen=True)
class Trial:
    """rounds: forwards of the target that verified drafts. acceptance_length: tokens per such forward.
    identical: the text is the one without the drafter (in bfloat16, near-ties may decide otherwise)."""

    rounds: int
    acceptance_length: float
    identical: bool


@torch.no_grad()
def try_drafter(
    folder: str | Path, target: PreTrainedModel, input_ids: torch.Tensor, max_new_tokens: int = 32
) -> Trial:
    """Generates greedily with and without the drafter of a folder.

    Args:
        input_ids: a prompt `[1, S]` as the drafter's text has them (chat template applied).

    Raises:
        ValueError: the drafter does not load, or does not fit the target.
        RuntimeError: it loads and fits, and nothing was drafted.
    """
    drafter = DominoDraftModel.from_pretrained(str(folder), dtype=target.dtype).to(target.device)
    drafter.generation_config.num_assistant_tokens_schedule = "constant"  # whatever it costs on this machine
    input_ids = input_ids.to(target.device)
    options = {
        "inputs": input_ids,
        "attention_mask": torch.ones_like(input_ids),
        "do_sample": False,
        "max_new_tokens": max_new_tokens,
    }
    plain = target.generate(**options)
    drafted = target.generate(**options, assistant_model=drafter)
    stats = drafter.drafting_stats
    if stats is None or not sum(stats.drafted):
        raise RuntimeError(f"The drafter in {folder} drafted nothing for {type(target).__name__}.")
    return Trial(len(stats.drafted), stats.acceptance_length, torch.equal(plain, drafted))
