"""A Domino draft round written straight from the method's description: what the drafter's own is measured against.

The same backbone layers and the same drafts, but the head goes token by token over all of V, as the published
formulas stand, and the context's keys and values are concatenated anew each round. Not for use.
"""

import torch
from torch import nn

from hf_domino.drafter.modeling_domino import DominoDraftModel
from hf_domino.drafter.target_domino import Target
from hf_domino.drafter.vocabulary_domino import token_ids


class StraightforwardDrafting:
    """Greedy chains for one sequence.

    Raises:
        ValueError: the drafter's head is not a GRU, for which alone the published formulas are given.
    """

    def __init__(self, drafter: DominoDraftModel, target: Target):
        if drafter.config.head_type != "gru":
            raise ValueError(f"There is no straightforward loop for a head of type {drafter.config.head_type!r}.")
        self.drafter = drafter
        self.target = target
        self.caches: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.token_ids = None if drafter.config.draft_vocab_size is None else token_ids(drafter.d2t)
        # A plain module: the drafter's own may step in other ways.
        self.gru = nn.GRU(drafter.config.hidden_size, drafter.config.head_hidden_size, bias=False, batch_first=True)
        self.gru.weight_ih_l0, self.gru.weight_hh_l0 = drafter.prefix_gru.weight_ih_l0, drafter.prefix_gru.weight_hh_l0

    @torch.no_grad()
    def round(self, tapped_BST: torch.Tensor, anchor_B: torch.Tensor, depth: int) -> list[int]:
        """Adds new context and drafts.

        Args:
            tapped_BST: tapped states of the newly verified positions `[1, n, M·H]`.
            anchor_B: the last decided token `[1]`.
            depth: tokens to draft.
        """
        config, like = self.drafter.config, self.drafter.hidden_norm.weight
        seen = self.caches[0][0].shape[2] if self.caches else 0
        positions = torch.arange(seen, seen + tapped_BST.shape[1], device=like.device)[None]
        new = self.drafter.context_keys_values(tapped_BST, positions)
        self.caches = (
            new
            if not self.caches
            else [
                (torch.cat([keys, more_keys], dim=2), torch.cat([values, more_values], dim=2))
                for (keys, values), (more_keys, more_values) in zip(self.caches, new, strict=True)
            ]
        )
        seen += tapped_BST.shape[1]
        masks = torch.full((1, config.block_size - 1), config.mask_token_id, device=anchor_B.device)
        embeds = self.target.embed(torch.cat([anchor_B[:, None], masks], dim=1), like)
        positions = torch.arange(seen, seen + config.block_size, device=like.device)[None]
        hidden = self.drafter(embeds, positions, self)
        base = self.target.base_logits(hidden)
        if self.token_ids is not None:
            base = base[..., self.token_ids]
        state, token, drafts = None, anchor_B[:, None], []
        for k in range(depth):
            output, state = self.gru(self.target.embed(token, like), state)
            logits = base[:, k + config.row_offset]
            if k >= config.pure_draft_prefix_len:
                row = hidden[:, k + config.row_offset]
                logits = logits + self.drafter.embed_proj(torch.cat([row, output[:, 0]], dim=-1))
            token = logits.argmax(dim=-1, keepdim=True)
            if self.token_ids is not None:
                token = self.token_ids[token]
            drafts.append(token)
        return torch.cat(drafts, dim=1)[0].tolist()

    def update(self, keys: torch.Tensor, values: torch.Tensor, layer_idx: int, *args, **kwargs):
        """Called by the drafter's attention: context and block, concatenated."""
        context_keys, context_values = self.caches[layer_idx]
        return torch.cat([context_keys, keys], dim=2), torch.cat([context_values, values], dim=2)
