"""One call's drafting: context in, draft nodes out. One backbone forward per round; no copy to the host in it."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from .context_domino import ContextMemory
from .head_domino import effective_weight
from .modeling_domino import DominoDraftModel
from .target_domino import Target


@dataclass
class DraftLevels:
    """Draft nodes by depth, for B sequences; W nodes at most a level, padded with log-probability -inf.

    tokens_BDW: token ids. parents_BDW: index of the parent in the level above (0 at the first level: the anchor).
    logprobs_BDW: log-probability of the path from the anchor to the node, by the drafter's final distribution.
    """

    tokens_BDW: torch.Tensor
    parents_BDW: torch.Tensor
    logprobs_BDW: torch.Tensor

    def to_host(self) -> list[tuple[list[list[int]], list[list[int]], list[list[float]]]]:
        """Per sequence: tokens, parents and log-probabilities by level. The round's only synchronisation."""
        # float64 holds every token id and float32 exactly, so one transfer carries all three.
        parts = torch.stack([t.double() for t in (self.tokens_BDW, self.parents_BDW, self.logprobs_BDW)], dim=1)
        return [
            ([[int(t) for t in level] for level in tokens], [[int(p) for p in level] for level in parents], logprobs)
            for tokens, parents, logprobs in parts.tolist()
        ]


class DraftingSession:
    """The drafter's state within one `generate` call: context memory, and the head's matrices as they are now.

    Args:
        drafter: with its adapters active, if it has any.
        target: the pair has been checked.
        temperature: divides the logits before path probabilities are taken (of the call's sampling; 1 for greedy).
    """

    def __init__(self, drafter: DominoDraftModel, target: Target, temperature: float = 1.0):
        self.drafter = drafter.eval()  # dropout would use up the random numbers of sampling
        self.target = target
        self.temperature = temperature
        self.config = drafter.config
        self.memory = ContextMemory(self.config.num_hidden_layers, self.config.context_window)
        self._seen: list[int] = []
        like = drafter.hidden_norm.weight
        self._mask_embed = target.embed(torch.tensor([self.config.mask_token_id]), like)
        if drafter.prefix_encoder is not None:
            first, last = effective_weight(drafter.embed_proj[0]), effective_weight(drafter.embed_proj[2])
            self._hidden_in, self._state_in = first.split([self.config.hidden_size, self.config.head_hidden_size], 1)
            self._out = last
        self._token_ids = drafter.draft_token_ids
        if self._token_ids is not None:
            self._head_rows = target.head_rows(self._token_ids, like)

    def observe(self, tapped_BST: torch.Tensor, counts: list[int]) -> None:
        """Adds verified positions to the context.

        Args:
            tapped_BST: the target's tapped states `[B, n, M·H]`.
            counts: how many of the n positions each sequence keeps: its first ones.
        """
        like = self.drafter.hidden_norm.weight
        if not self._seen:
            self._seen = [0] * len(counts)
        # Rotary attention sees differences only, so counting what was observed does for absolute positions.
        first = torch.tensor(self._seen, device=like.device)[:, None]
        positions = first + torch.arange(tapped_BST.shape[1], device=like.device)
        tapped = tapped_BST.to(device=like.device, dtype=like.dtype)
        keys_values = self.drafter.context_keys_values(tapped, positions)
        self.memory.append(keys_values, counts, self.config.block_size)
        self._seen = [seen + count for seen, count in zip(self._seen, counts, strict=True)]

    def select(self, rows: list[int]) -> None:
        """Keeps these sequences only."""
        self.memory.select(rows)
        self._seen = [self._seen[row] for row in rows]

    def block_states(self, anchors_B: torch.Tensor) -> torch.Tensor:
        """Block states `[B, K, H]` of the blocks that start at these anchor tokens."""
        like = self.drafter.hidden_norm.weight
        rows, batch = self.config.block_size, anchors_B.shape[0]
        anchor = self.target.embed(anchors_B, like)[:, None]
        embeds = torch.cat([anchor, self._mask_embed.expand(batch, rows - 1, -1)], dim=1)
        positions = torch.tensor(self._seen, device=like.device)[:, None] + torch.arange(rows, device=like.device)
        masks = {}
        for layer_type in set(self.config.layer_types):
            window = self.config.sliding_window if layer_type == "sliding_attention" else None
            masks[layer_type] = self.memory.attention_mask(rows, window, like)
        return self.drafter(embeds, positions, self.memory, masks)

    @torch.no_grad()
    def propose(self, anchors_B: torch.Tensor, depth: int, width: int) -> DraftLevels:
        """Draft nodes after the anchors: at each level the `width` most probable paths.

        A path's probability never rises with its length, so the n <= width most probable nodes of all levels are the
        n that best-first search (DominoTree, arXiv:2607.08642) would pop. `width` 1 is the greedy chain.

        Args:
            anchors_B: the last decided token of each sequence.
            depth: levels, at most J.
        """
        depth = min(depth, self.config.max_drafts)
        hidden = self.block_states(anchors_B)[:, self.config.row_offset : self.config.row_offset + depth]
        hidden = hidden.contiguous()  # products of a strided slice are run as batched ones, several times slower
        batch, device = hidden.shape[0], hidden.device
        like = self.drafter.hidden_norm.weight
        encoder = self.drafter.prefix_encoder
        # All that the previous token does not decide, for all positions at once.
        pool = self._candidate_pool(hidden)
        hidden_of = hidden.unbind(1)
        if encoder is not None:
            from_hidden = F.linear(hidden, self._hidden_in)[:, :, None].unbind(1)
            state = encoder.start(batch)
        first_path = torch.arange(batch, device=device)[:, None]

        tokens = anchors_B.to(device)[:, None]  # [B, n]: last token of each path of the frontier
        path_logprobs = torch.zeros(batch, 1, device=device)
        levels: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
        for j in range(depth):
            frontier = tokens.shape[1]
            scores = pool.base[j]
            if encoder is not None:
                embeds = self.target.embed(tokens.flatten(), like)
                output, state = encoder.step(embeds, hidden_of[j].repeat_interleave(frontier, dim=0), state)
                if j >= self.config.pure_draft_prefix_len:
                    output = output.unflatten(0, (batch, frontier))
                    features = F.silu(from_hidden[j] + F.linear(output, self._state_in))
                    scores = scores + self._scaled(_rowwise_product(features, pool.out_rows[j]).float())
            paths = (path_logprobs[..., None] + self._normalise(scores, pool.rest[j])).flatten(1)
            path_logprobs, best = paths.topk(min(width, paths.shape[1]), dim=-1)
            parents, choices = best // pool.size, best % pool.size
            tokens = pool.ids[j].gather(1, choices)
            levels.append((tokens, parents, path_logprobs))
            if encoder is not None and j + 1 < depth:
                state = encoder.select(state, (parents + first_path * frontier).flatten())
        most = max(level[0].shape[1] for level in levels)
        padded = [[_padded(part, most, fill) for part, fill in zip(level, (0, 0, -torch.inf))] for level in levels]
        return DraftLevels(*(torch.stack(parts, dim=1) for parts in zip(*padded)))

    def _candidate_pool(self, hidden_BJH: torch.Tensor) -> "_Pool":
        if self._token_ids is None:
            logits = self._scaled(self.target.base_logits(hidden_BJH))
        else:
            logits = self._scaled(F.linear(hidden_BJH, self._head_rows).float())
        whole = logits.shape[-1]
        size = min(self.config.candidate_pool_size or whole, whole)
        if size == whole:
            indices = torch.arange(size, device=logits.device).expand(logits.shape)
            base, rest = logits, logits.new_full(logits.shape[:2], -torch.inf)
        else:
            total = logits.logsumexp(-1)
            base, indices = logits.topk(size, dim=-1)
            inside = (base.logsumexp(-1) - total).exp()
            rest = total + torch.log1p(-inside.clamp_max(1 - 1e-6))
        out_rows: Sequence[torch.Tensor] = ()
        if self.drafter.prefix_encoder is not None:
            out_rows = [self._out] * logits.shape[1] if size == whole else self._out[indices].unbind(1)
        ids = indices if self._token_ids is None else self._token_ids[indices]
        return _Pool(ids.unbind(1), base[:, :, None].unbind(1), rest[:, :, None].unbind(1), out_rows)

    def _scaled(self, logits: torch.Tensor) -> torch.Tensor:
        return logits if self.temperature == 1.0 else logits / self.temperature

    def _normalise(self, scores: torch.Tensor, rest: torch.Tensor) -> torch.Tensor:
        """Log-probabilities of the pool; the tokens outside it keep their base logits' mass."""
        return scores - torch.logaddexp(scores.logsumexp(-1), rest)[..., None]


def _rowwise_product(features_BNR: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Features times the rows `[B, C, R]` or `[V, R]` of a matrix: `[B, N, C]`."""
    if features_BNR.shape[0] == 1:  # a batched product of one costs several times a plain one on CPUs
        return F.linear(features_BNR, rows.flatten(0, -2))
    return torch.matmul(features_BNR, rows.mT)


def _padded(part_BN: torch.Tensor, most: int, fill: float) -> torch.Tensor:
    missing = most - part_BN.shape[1]
    return part_BN if missing == 0 else F.pad(part_BN, (0, missing), value=fill)


@dataclass
class _Pool:
    """Candidates of each draft position j: what the head rescores.

    ids: token ids `[B, C]`. base: base logits `[B, 1, C]`. rest: log-mass outside the pool `[B, 1]`. out_rows: the
    head's last matrix at the candidates, `[B, C, R]` (all of it, `[V, R]`, where the pool is).
    """

    ids: Sequence[torch.Tensor]
    base: Sequence[torch.Tensor]
    rest: Sequence[torch.Tensor]
    out_rows: Sequence[torch.Tensor]

    @property
    def size(self) -> int:
        return self.ids[0].shape[-1]
