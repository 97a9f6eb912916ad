"""Where two decodings of one model part: how far apart the target's two best logits were there."""

from typing import Any

import torch
from transformers import PreTrainedModel

from .metrics.output_agreement.output_agreement import first_difference


@torch.no_grad()
def near_tie(
    model: PreTrainedModel, prompt_ids: list[int], reference: list[int], ours: list[int]
) -> dict[str, Any] | None:
    """The first difference of a greedy text from the plain one, or `None` if they are the same.

    Returns:
        position: index in the new text. plain, ours: the tokens there (`None`: the text had ended). margin: the
        target's best logit less its second, by one forward over all before. top2: whether both texts took one of the
        two best. gap: how far below the best the worse of the two tokens is (`None`: a text had ended): where more
        than two tie, this, and not `top2`, tells rounding from an error.
    """
    position = first_difference(ours, reference)
    if position is None:
        return None
    before = torch.tensor([prompt_ids + reference[:position]], device=model.device)
    logits = model(before, attention_mask=torch.ones_like(before)).logits[0, -1].float()
    values, tokens = (part.tolist() for part in logits.topk(2))
    took = [text[position] if position < len(text) else None for text in (reference, ours)]
    return {
        "position": position,
        "plain": took[0],
        "ours": took[1],
        "margin": values[0] - values[1],
        "top2": all(token in tokens for token in took),
        "gap": None if None in took else max(values[0] - float(logits[token]) for token in took),
    }
