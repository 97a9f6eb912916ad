"""The training objective: base and final cross-entropy, decayed over the block and chunked over blocks.

Source: arXiv:2605.29707, section 3.4; the decay `exp(-k / gamma)` and its gamma are DFlash's (arXiv:2602.06036).
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from hf_domino.drafter.modeling_domino import DominoDraftModel

from .vocabulary import OutputVocabulary


@dataclass
class BlockLoss:
    """Sums over the supervised drafts of a batch, so that chunks and processes add up.

    base, final: weighted sums of the cross-entropies. weight: sum of the decay weights.
    base_accepted, final_accepted: drafts accepted before the first wrong one (greedy, teacher-forced, over the
    vocabulary of the loss), and `blocks`, the blocks they are counted over.
    """

    base: torch.Tensor
    final: torch.Tensor
    weight: torch.Tensor
    base_accepted: torch.Tensor
    final_accepted: torch.Tensor
    blocks: torch.Tensor

    def __add__(self, other: "BlockLoss") -> "BlockLoss":
        return BlockLoss(*(a + b for a, b in zip(vars(self).values(), vars(other).values(), strict=True)))


def default_gamma(block_size: int) -> float:
    """Gamma for blocks of K rows: 7 at 16 and 4 at 8, as DFlash has it, and linear between and beyond."""
    return 1.0 + 0.375 * block_size


def decay_weights(num_drafts: int, gamma: float, device=None) -> torch.Tensor:
    """`exp(-k / gamma)` for draft k = 0 .. J-1."""
    return torch.exp(-torch.arange(num_drafts, device=device) / gamma)


def accepted_drafts(correct_NJ: torch.Tensor) -> torch.Tensor:
    """Drafts before the first wrong one, summed over blocks."""
    return correct_NJ.long().cumprod(dim=-1).sum()


def block_loss(
    drafter: DominoDraftModel,
    states_NJH: torch.Tensor,
    prefix_embeds_NJH: torch.Tensor,
    labels_NJ: torch.Tensor,
    supervised_NJ: torch.Tensor,
    vocabulary: OutputVocabulary,
    gamma: float,
    with_base: bool = True,
    with_head: bool = True,
    chunk_blocks: int = 256,
) -> BlockLoss:
    """Base and final cross-entropies over N blocks.

    Args:
        states_NJH: the block states that the J drafts are read from.
        prefix_embeds_NJH: raw embeddings of the tokens before each draft: the anchor's, then the true drafts'.
        labels_NJ: the true tokens, as indices into `vocabulary`.
        supervised_NJ: true where the draft counts.
        vocabulary: the output head, whole or restricted.
        with_base: false while λ = 0: the base loss is measured, without gradient.
        with_head: false while λ = 1: the head is not run at all, and `final` is `base`.
        chunk_blocks: blocks whose logits are alive at once; each chunk is recomputed in the backward pass.
    """
    has_head = with_head and drafter.prefix_encoder is not None
    with_base = with_base or not has_head  # without a head the base loss is the final loss
    total = None
    for chunk in torch.arange(states_NJH.shape[0], device=states_NJH.device).split(chunk_blocks):
        arguments = (
            drafter,
            states_NJH[chunk],
            prefix_embeds_NJH[chunk],
            labels_NJ[chunk],
            supervised_NJ[chunk],
            vocabulary,
            gamma,
            with_base,
            has_head,
        )
        if torch.is_grad_enabled() and states_NJH.shape[0] > chunk_blocks:
            part = BlockLoss(*checkpoint(_chunk_loss, *arguments, use_reentrant=False))
        else:
            part = BlockLoss(*_chunk_loss(*arguments))
        total = part if total is None else total + part
    assert total is not None, "there is at least one block"
    return total


def _chunk_loss(
    drafter: DominoDraftModel,
    states: torch.Tensor,
    prefix_embeds: torch.Tensor,
    labels: torch.Tensor,
    supervised: torch.Tensor,
    vocabulary: OutputVocabulary,
    gamma: float,
    with_base: bool,
    has_head: bool,
) -> tuple[torch.Tensor, ...]:
    weights = decay_weights(labels.shape[1], gamma, labels.device) * supervised
    base_logits = vocabulary.base_logits(states)
    base, base_correct = _cross_entropy(base_logits if with_base else base_logits.detach(), labels, weights)
    final, final_correct = base, base_correct
    if has_head:
        pure = drafter.config.pure_draft_prefix_len
        encoded = drafter.prefix_encoder.encode(prefix_embeds, states)
        features = drafter.embed_proj.features(states[:, pure:], encoded[:, pure:])
        corrected = base_logits[:, pure:] + vocabulary.correction(features, drafter.embed_proj[2])
        final_tail, correct_tail = _cross_entropy(corrected, labels[:, pure:], weights[:, pure:])
        if pure:
            base_head, _ = _cross_entropy(base_logits[:, :pure], labels[:, :pure], weights[:, :pure])
            final_tail = final_tail + base_head
        final = final_tail
        final_correct = torch.cat([base_correct[:, :pure], correct_tail], dim=1)
    supervised_prefix = supervised.bool()
    return (
        base,
        final,
        weights.sum(),
        accepted_drafts(base_correct & supervised_prefix),
        accepted_drafts(final_correct & supervised_prefix),
        supervised_prefix[:, 0].sum(),
    )


def _cross_entropy(
    logits: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Weighted sum of the losses, and where the most probable token is the true one."""
    losses = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view_as(weights)
    return (losses * weights).sum(), logits.detach().argmax(-1) == labels
