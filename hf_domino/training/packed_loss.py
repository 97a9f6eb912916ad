"""`PackedLoss`: from a batch with blocks to its loss sums, in one module that DDP and autocast can enclose."""

from typing import Any

import torch
from torch import nn

from hf_domino.drafter.modeling_domino import DominoDraftModel
from hf_domino.drafter.target_domino import Target, unwrap

from .blocks import Blocks, block_states
from .objective import BlockLoss, Teacher, block_loss
from .vocabulary import OutputVocabulary, head_matrix


class PackedLoss(nn.Module):
    """The drafter's losses on a batch: what a distributed wrapper is put around.

    The target is not a part of it: nothing here is synchronised, saved or trained but the drafter.

    Args:
        model: the drafter, or a PEFT wrapper of it.
        view: the target as the drafter sees it.
        block_size: K in training.
        gamma: of the decay weights.
        frequent: tokens that a sampled softmax always holds, or `None` for the whole vocabulary (the drafter's own, if
            it has one).
        num_random: further tokens that it draws.
        chunk_blocks: blocks whose logits are alive at once.
    """

    def __init__(
        self,
        model: nn.Module,
        view: Target,
        block_size: int,
        gamma: float,
        frequent: torch.Tensor | None = None,
        num_random: int = 1024,
        chunk_blocks: int = 256,
    ):
        super().__init__()
        self.model = model
        self._view = view
        rows = view.config.vocab_size  # a target's vocabulary may be padded
        self._head = tuple(None if part is None else part[:rows] for part in head_matrix(view.output_head))
        self._frequent = frequent
        self.block_size = block_size
        self.gamma = gamma
        self.num_random = num_random
        self.chunk_blocks = chunk_blocks

    @property
    def drafter(self) -> DominoDraftModel:
        """The drafter itself; its adapters, if any, live inside its modules."""
        return unwrap(self.model)

    def forward(
        self,
        tapped_states: torch.Tensor,
        blocks: dict[str, torch.Tensor],
        base_weight: float,
        generator: torch.Generator | None = None,
        teacher: Teacher | None = None,
    ) -> tuple[torch.Tensor, BlockLoss]:
        """Loss sum and its parts.

        Args:
            tapped_states: the target's, `[B, S, M·H]`.
            blocks: the fields of [`Blocks`].
            base_weight: λ.
            generator: draws the sampled softmax's tokens.
            teacher: the target's distribution after each token, `[B, S, k]`; by default the labels are the truth.

        Returns:
            `(1 - λ) · final + λ · base`, not yet divided by the sum of weights, and all sums, detached.
        """
        drafter = self.drafter
        # Every parameter takes part, with a zero gradient at least: while λ = 1 the head has no other, and DDP waits
        # for all of them.
        trained = [p for p in self.model.parameters() if p.requires_grad]
        unused = torch.stack([p.sum() for p in trained]).sum() * 0.0
        these = Blocks(**blocks)
        real = these.real_BA
        if not bool(real.any()):
            return unused, BlockLoss(*(unused.detach() for _ in BlockLoss.__dataclass_fields__))
        like = drafter.fc.weight
        offset = drafter.config.row_offset
        prefix_embeds = self._view.embed(these.tokens_BAJ[..., :-1], like)
        mask_embed = self._view.embed(torch.tensor(drafter.config.mask_token_id), like)
        tapped = tapped_states.to(device=like.device, dtype=like.dtype)
        states = block_states(drafter, tapped, prefix_embeds[:, :, 0], mask_embed, these.anchors_BA, self.block_size)[
            :, :, offset:
        ]
        labels = these.tokens_BAJ[..., 1:][real]
        if teacher is not None:
            teacher = _of_drafts(teacher, these, drafter.config.vocab_size)
        vocabulary = self._vocabulary(labels, teacher, states, generator)
        sums = block_loss(
            drafter,
            states[real],
            prefix_embeds[real],
            labels,
            these.supervised_BAJ[real],
            vocabulary,
            self.gamma,
            with_base=base_weight > 0,
            with_head=base_weight < 1,
            chunk_blocks=self.chunk_blocks,
            teacher=teacher,
        )
        loss = (1 - base_weight) * sums.final + base_weight * sums.base
        return loss + unused, BlockLoss(*(value.detach().float() for value in vars(sums).values()))

    def _vocabulary(
        self,
        labels: torch.Tensor,
        teacher: Teacher | None,
        states: torch.Tensor,
        generator: torch.Generator | None,
    ) -> OutputVocabulary:
        weight, bias = (None if part is None else part.to(states.device) for part in self._head)
        device_type = states.device.type
        autocast = torch.is_autocast_enabled(device_type)
        dtype: Any = torch.get_autocast_dtype(device_type) if autocast else states.dtype
        own = self.drafter.draft_token_ids
        if own is not None:
            return OutputVocabulary.restricted(weight, bias, own, dtype)
        if self._frequent is None:
            return OutputVocabulary(weight, bias, dtype=dtype)
        certain = torch.cat([self._frequent.to(labels.device), labels.flatten()])
        if teacher is not None:
            certain = torch.cat([certain, teacher.ids.flatten()])
        return OutputVocabulary.sampled(weight, bias, certain, self.num_random, generator, dtype)


def _of_drafts(teacher: Teacher, blocks: Blocks, vocab_size: int) -> Teacher:
    """The target's distributions of the drafts of the N real blocks, `[N, J, k]`, without the padding of its
    vocabulary."""
    steps = torch.arange(blocks.supervised_BAJ.shape[-1], device=blocks.anchors_BA.device)
    positions = (blocks.anchors_BA[..., None] + steps).clamp_max(teacher.ids.shape[1] - 1)
    rows = torch.arange(positions.shape[0], device=positions.device)[:, None, None]
    ids, probs = (part.to(positions.device)[rows, positions][blocks.real_BA] for part in teacher)
    return Teacher(ids.clamp_max(vocab_size - 1), probs * (ids < vocab_size))
