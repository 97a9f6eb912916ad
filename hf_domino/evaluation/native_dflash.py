"""A drafter's backbone under transformers' own DFlash generator (`speculation_type="dflash"`), for comparison."""

import torch
from torch import nn
from transformers.modeling_outputs import BaseModelOutputWithPast

from hf_domino.drafter.modeling_domino import DominoDraftModel


class NativeDFlashAssistant(nn.Module):
    """Shows a drafter's backbone to `DFlashTokenCandidateGenerator` as one of transformers' DFlash assistants.

    Generator and cache are transformers'; the layers are the drafter's, its head is not used. That generator reads the
    rows from the second on. For drafters whose first row is a draft too (`shift_label` true), a row is put before it
    to be dropped in its place, so that both kinds are drafted with all they offer.

    Raises:
        ValueError: the drafter has sliding-window layers, whose cache there does not hold the block as ours does.
    """

    def __init__(self, drafter: DominoDraftModel):
        super().__init__()
        if "sliding_attention" in drafter.config.layer_types:
            raise ValueError("the drafter has sliding-window layers, which are not shown to transformers' generator")
        self.drafter = drafter
        self.config = drafter.config
        self.generation_config = drafter.generation_config

    @property
    def device(self) -> torch.device:
        return self.drafter.device

    @torch.no_grad()
    def forward(
        self,
        noise_embeds: torch.Tensor,
        context_hidden_states: torch.Tensor,
        position_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        cache=None,
    ) -> BaseModelOutputWithPast:
        """Block states `[1, K, H]`, or `[1, K + 1, H]` with the row to be dropped.

        Args:
            noise_embeds: anchor and masks `[1, K, H]`.
            context_hidden_states: tapped states of the n newly verified positions `[1, n, M·H]`.
            position_ids: of both, `[1, n + K]`.
            attention_mask: not read: one sequence without padding attends to all it has.
            cache: transformers' `DFlashCache`, which keeps context and block.
        """
        dtype = self.drafter.fc.weight.dtype
        rows = context_hidden_states.shape[1]
        context = self.drafter.context_keys_values(context_hidden_states.to(dtype), position_ids[:, :rows])
        block = self.drafter(noise_embeds.to(dtype), position_ids[:, rows:], _ContextThenBlock(cache, context))
        if self.config.row_offset == 0:
            block = torch.cat([block[:, :1], block], dim=1)
        return BaseModelOutputWithPast(last_hidden_state=block.to(noise_embeds.dtype))  # the target's head is next


class _ContextThenBlock:
    """Writes a layer's new context before its block, as transformers' DFlash models do inside their layers."""

    def __init__(self, cache, context: list[tuple[torch.Tensor, torch.Tensor]]):
        self.cache = cache
        self.context = context

    def update(self, keys: torch.Tensor, values: torch.Tensor, layer_idx: int, *args, **kwargs):
        context_keys, context_values = self.context[layer_idx]
        keys, values = torch.cat([context_keys, keys], dim=2), torch.cat([context_values, values], dim=2)
        return self.cache.update(keys, values, layer_idx)
