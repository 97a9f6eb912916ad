"""The training objective: base and final loss, weighted over the block and chunked over blocks.

Source: arXiv:2605.29707, section 3.4; the decay `exp(-k / gamma)` and its gamma are DFlash's (arXiv:2602.06036).
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from hf_domino.drafter.modeling_domino import DominoDraftModel

from .vocabulary import OutputVocabulary


@dataclass
class BlockLoss:
    """Sums over the supervised drafts of a batch, so that chunks and processes add up.

    base, final: weighted sums of the losses. weight: sum of the decay weights.
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


class Teacher(NamedTuple):
    """The target's most probable next tokens, in place of the one that its text went on with.

    ids: token ids `[..., k]`. probs: their probabilities `[..., k]`.
    """

    ids: torch.Tensor
    probs: torch.Tensor


def most_probable(logits: torch.Tensor, top_k: int) -> Teacher:
    """The `top_k` most probable tokens of logits `[..., V]`, with their probabilities."""
    best, ids = logits.topk(min(top_k, logits.shape[-1]), dim=-1)
    rows = logits.flatten(0, -2).split(512)  # no float32 copy of all logits at once
    total = torch.cat([part.float().logsumexp(-1) for part in rows]).view(*logits.shape[:-1], 1)
    return Teacher(ids, (best.float() - total).exp())


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
    teacher: Teacher | None = None,
) -> BlockLoss:
    """Base and final losses over N blocks.

    Args:
        states_NJH: the block states that the J drafts are read from.
        prefix_embeds_NJH: raw embeddings of the tokens before each draft: the anchor's, then the true drafts'.
        labels_NJ: the true tokens.
        supervised_NJ: true where the draft counts; a token outside `vocabulary` never does.
        vocabulary: the output head, whole or over some of its tokens.
        with_base: false while λ = 0: the base loss is measured, without gradient.
        with_head: false while λ = 1: the head is not run at all, and `final` is `base`.
        chunk_blocks: blocks whose logits are alive at once; each chunk is recomputed in the backward pass.
        teacher: the target's distribution of each draft, `[N, J, k]`: the loss is then the Kullback-Leibler divergence
            from it (over these k tokens), not the cross-entropy with the label.
    """
    has_head = with_head and drafter.prefix_encoder is not None
    with_base = with_base or not has_head  # without a head the base loss is the final loss
    labels_NJ = vocabulary.index(labels_NJ)
    supervised_NJ = supervised_NJ & (labels_NJ >= 0)
    truth = _Truth(labels_NJ.clamp_min(0), supervised_NJ, *_over(vocabulary, teacher))
    decay_J = decay_weights(labels_NJ.shape[1], gamma, labels_NJ.device)
    total = None
    for chunk in torch.arange(states_NJH.shape[0], device=states_NJH.device).split(chunk_blocks):
        arguments = (
            drafter,
            states_NJH[chunk],
            prefix_embeds_NJH[chunk],
            _Truth(*(None if part is None else part[chunk] for part in truth)),
            vocabulary,
            decay_J,
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


class _Truth(NamedTuple):
    """What the drafts of N blocks are compared with, as indices into a vocabulary; `teacher_probs` sum to 1."""

    labels: torch.Tensor
    supervised: torch.Tensor
    teacher: torch.Tensor | None = None
    teacher_probs: torch.Tensor | None = None

    def drafts(self, first: int | None, end: int | None) -> "_Truth":
        return _Truth(*(None if part is None else part[:, first:end] for part in self))


def _over(vocabulary: OutputVocabulary, teacher: Teacher | None) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """The teacher's distribution over a vocabulary: what lies outside is cut off, and the rest sums to 1."""
    if teacher is None:
        return None, None
    index = vocabulary.index(teacher.ids)
    probs = teacher.probs.float() * (index >= 0)
    return index.clamp_min(0), probs / probs.sum(-1, keepdim=True).clamp_min(1e-9)


def _chunk_loss(
    drafter: DominoDraftModel,
    states: torch.Tensor,
    prefix_embeds: torch.Tensor,
    truth: _Truth,
    vocabulary: OutputVocabulary,
    decay_J: torch.Tensor,
    with_base: bool,
    has_head: bool,
) -> tuple[torch.Tensor, ...]:
    weights = decay_J * truth.supervised
    base_logits = vocabulary.base_logits(states)
    base = final = _draft_losses(base_logits if with_base else base_logits.detach(), truth)
    if has_head:
        pure = drafter.config.pure_draft_prefix_len
        encoded = drafter.prefix_encoder.encode(prefix_embeds, states)
        features = drafter.embed_proj.features(states[:, pure:], encoded[:, pure:])
        corrected = base_logits[:, pure:] + vocabulary.correction(features, drafter.embed_proj[2])
        first = _draft_losses(base_logits[:, :pure], truth.drafts(None, pure))
        rest = _draft_losses(corrected, truth.drafts(pure, None))
        losses, correct = (torch.cat(parts, dim=1) for parts in zip(first, rest, strict=True))
        final = losses, correct
    return (
        (base[0] * weights).sum(),
        (final[0] * weights).sum(),
        weights.sum(),
        accepted_drafts(base[1] & truth.supervised),
        accepted_drafts(final[1] & truth.supervised),
        torch.tensor(truth.labels.shape[0], device=truth.labels.device),
    )


def _draft_losses(logits: torch.Tensor, truth: _Truth) -> tuple[torch.Tensor, torch.Tensor]:
    """Per draft: its loss, and whether the true token is the most probable one."""
    labels = truth.labels
    correct = logits.detach().argmax(-1) == labels
    if truth.teacher is None or truth.teacher_probs is None:
        losses = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view_as(labels)
        return losses, correct
    logs = logits.log_softmax(-1)
    probs = truth.teacher_probs
    losses = (torch.xlogy(probs, probs) - probs * logs.gather(-1, truth.teacher)).sum(-1)
    return losses, correct
