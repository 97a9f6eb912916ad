"""The training objective: `(1 - λ) · L_final + λ · L_base`, decayed over the block and chunked over blocks.

Source: arXiv:2605.29707, section 3.4 (base-anchored curriculum); `exp(-k / γ)` decay and its γ from DFlash.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from hf_domino.drafter.modeling_domino import DominoDraftModel


@dataclass
class Curriculum:
    """λ over training: the backbone alone, then a linear hand-over to the corrected distribution.

    Args:
        base_share: share of the steps with λ = 1.
        handover_share: share of the steps over which λ falls from 1 to `end`.
    """

    base_share: float = 0.2
    handover_share: float = 0.5
    end: float = 0.0

    def weight(self, progress: float) -> float:
        """λ at `progress` (0 to 1) through training."""
        if progress < self.base_share:
            return 1.0
        if self.handover_share <= 0:
            return self.end
        done = min(1.0, (progress - self.base_share) / self.handover_share)
        return 1.0 + (self.end - 1.0) * done


@dataclass
class BlockLoss:
    """Sums over the supervised drafts of a batch, so that chunks and processes add up.

    weight: sum of the decay weights. accepted / blocks: drafts accepted before the first wrong one (greedy,
    teacher-forced), and the blocks they are counted over.
    """

    base: torch.Tensor
    final: torch.Tensor
    weight: torch.Tensor
    base_accepted: torch.Tensor
    final_accepted: torch.Tensor
    blocks: torch.Tensor

    def __add__(self, other: "BlockLoss") -> "BlockLoss":
        return BlockLoss(*(a + b for a, b in zip(vars(self).values(), vars(other).values(), strict=True)))


def decay_weights(num_drafts: int, gamma: float, device=None) -> torch.Tensor:
    """`exp(-k / γ)` for draft k = 0 .. J-1."""
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
    vocabulary: "OutputVocabulary",
    gamma: float,
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
        with_head: false while λ = 1: the head is not run at all.
        chunk_blocks: blocks whose logits are alive at once; each chunk is recomputed in the backward pass.
    """
    total = None
    for chunk in torch.arange(states_NJH.shape[0], device=states_NJH.device).split(chunk_blocks):
        arguments = (
            drafter, states_NJH[chunk], prefix_embeds_NJH[chunk], labels_NJ[chunk], supervised_NJ[chunk],
            vocabulary, gamma, with_head,
        )
        if torch.is_grad_enabled() and states_NJH.shape[0] > chunk_blocks:
            part = BlockLoss(*checkpoint(_chunk_loss, *arguments, use_reentrant=False))
        else:
            part = BlockLoss(*_chunk_loss(*arguments))
        total = part if total is None else total + part
    return total


def _chunk_loss(drafter, states, prefix_embeds, labels, supervised, vocabulary, gamma, with_head):
    weights = decay_weights(labels.shape[1], gamma, labels.device) * supervised
    base_logits = vocabulary.base_logits(states)
    base, base_correct = _cross_entropy(base_logits, labels, weights)
    final, final_correct = base, base_correct
    if with_head and drafter.prefix_encoder is not None:
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


def _cross_entropy(logits: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor):
    losses = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view_as(weights)
    return (losses * weights).sum(), logits.detach().argmax(-1) == labels


class OutputVocabulary:
    """The target's output head over all of V, or over a sample of it with the sampling corrected for.

    A sampled softmax (frequent tokens always, the batch's labels always, others drawn with known probability) costs a
    fraction of the whole one; its logits are shifted by -log(probability of being drawn), which makes the sum over
    the sample an unbiased estimate of the sum over V.
    """

    def __init__(self, head_weight_VH: torch.Tensor, token_ids: torch.Tensor | None = None,
                 log_correction: torch.Tensor | None = None):
        self.token_ids = token_ids
        self.log_correction = log_correction
        self.head_weight = head_weight_VH if token_ids is None else head_weight_VH[token_ids]

    @classmethod
    def sampled(cls, head_weight_VH, labels: torch.Tensor, frequent: torch.Tensor, num_random: int):
        """Frequent tokens and labels for certain; `num_random` of the rest, uniformly.

        Returns:
            The vocabulary, and the labels as indices into it.
        """
        size = head_weight_VH.shape[0]
        certain = torch.cat([frequent, labels.flatten()]).unique()
        rest = torch.ones(size, dtype=torch.bool, device=certain.device)
        rest[certain] = False
        rest = rest.nonzero()[:, 0]
        drawn = rest[torch.randperm(rest.numel(), device=rest.device)[:num_random]]
        token_ids = torch.cat([certain, drawn])
        correction = torch.zeros(token_ids.numel(), device=token_ids.device)
        if drawn.numel():
            correction[certain.numel():] = torch.log(torch.tensor(rest.numel() / drawn.numel()))
        index = torch.full((size,), -1, device=certain.device)
        index[token_ids] = torch.arange(token_ids.numel(), device=certain.device)
        return cls(head_weight_VH, token_ids, correction), index[labels]

    def base_logits(self, states: torch.Tensor) -> torch.Tensor:
        logits = F.linear(states, self.head_weight.to(states.dtype)).float()
        return logits if self.log_correction is None else logits + self.log_correction

    def correction(self, features: torch.Tensor, last: torch.nn.Linear) -> torch.Tensor:
        """The head's correction at the vocabulary's tokens."""
        if self.token_ids is None:
            return last(features).float()
        return F.linear(features, last.weight[self.token_ids]).float()
