"""True accepted length on held-out prompts, during training."""

import logging
from collections.abc import Sequence

import torch
from torch.utils.data import Dataset
from transformers import PreTrainedModel, TrainerCallback

from hf_domino.drafter.modeling_domino import DominoDraftModel

logger = logging.getLogger(__name__)

METRIC = "eval_acceptance_length"


class HeldOutPrompts(Dataset):
    """Prompts that training never sees, as token ids `[S]` each."""

    def __init__(self, prompts: Sequence[Sequence[int]]):
        self.prompts = [torch.tensor(prompt, dtype=torch.long) for prompt in prompts]

    def __len__(self) -> int:
        return len(self.prompts)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.prompts[index]


@torch.no_grad()
def acceptance_length(
    target: PreTrainedModel, drafter: DominoDraftModel, prompts: Sequence[torch.Tensor], max_new_tokens: int
) -> tuple[int, int]:
    """Greedy generation as users get it, with trees and branches from the text, but always to the full size: timing
    then has no say.

    Returns:
        Tokens gained and the target's forwards they took (prefills not counted): their ratio is the accepted length.
    """
    was_training, schedule = drafter.training, drafter.generation_config.num_assistant_tokens_schedule
    drafter.eval()
    drafter.generation_config.num_assistant_tokens_schedule = "constant"
    tokens = forwards = 0
    try:
        for prompt in prompts:
            ids = prompt[None].to(target.device)
            target.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                assistant_model=drafter,
                do_sample=False,
                max_new_tokens=max_new_tokens,
            )
            accepted = drafter.drafting_stats.accepted
            tokens += sum(accepted) + len(accepted)
            forwards += len(accepted)
    finally:
        drafter.generation_config.num_assistant_tokens_schedule = schedule
        drafter.train(was_training)
    return tokens, forwards


class AcceptanceWatch(TrainerCallback):
    """Warns when the accepted length has fallen clearly below the best so far.

    Args:
        tolerance: the share of the best that may be lost without a word.
    """

    def __init__(self, tolerance: float = 0.05):
        self.tolerance = tolerance
        self.best = 0.0

    def on_evaluate(self, args, state, control, metrics=None, **kwargs):
        found = (metrics or {}).get(METRIC)
        if found is None:
            return
        if found < self.best * (1 - self.tolerance):
            logger.warning(
                "Step %d: the accepted length on held-out prompts is %.3f, down from %.3f. If it goes on falling, the "
                "drafter is forgetting or overfitting: lower the learning rate, or add text.",
                state.global_step,
                found,
                self.best,
            )
        self.best = max(self.best, found)
