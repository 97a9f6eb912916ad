"""One call's drafting: context in, draft nodes out. One backbone forward per round; no copy to the host in it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial, wraps
from typing import Any, TypeVar

import torch
import torch.nn.functional as F

from .backbone_domino import DraftingBackbone, ModelBackbone, plain_weights
from .context_domino import ContextMemory
from .head_domino import DraftingHead, effective_weight
from .modeling_domino import DominoDraftModel
from .packing_domino import kept, packs, product
from .target_domino import Target

T = TypeVar("T")


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


def _outside_autocast(method: Callable[..., T]) -> Callable[..., T]:
    """A caller's autocast is meant for the target; drafting has one dtype throughout, and kernels that mix none."""

    @wraps(method)
    def exact(self: "DraftingSession", *args: Any, **kwargs: Any) -> T:
        with torch.autocast(self._like.device.type, enabled=False):
            return method(self, *args, **kwargs)

    return exact


class DraftingSession:
    """The drafter's state within one `generate` call: context memory, and the drafter's weights as they are now.

    Args:
        drafter: with its adapters active, if it has any.
        target: the pair has been checked.
        temperature: divides the logits before path probabilities are taken (of the call's sampling; 1 for greedy).
    """

    @torch.no_grad()
    def __init__(self, drafter: DominoDraftModel, target: Target, temperature: float = 1.0):
        self.drafter = drafter.eval()  # dropout would use up the random numbers of sampling
        self.target = target
        self.temperature = temperature
        self.config = drafter.config
        self.memory = ContextMemory(self.config.context_window)
        self._seen: list[int] = []
        weights = plain_weights(drafter)
        self._packed = weights is not None and packs(drafter)
        stored = drafter.hidden_norm.weight
        dtype = torch.float32 if self._packed else stored.dtype
        self._like = stored.new_empty(0, dtype=dtype)
        products = partial(product, packed=self._packed, dtype=dtype)

        self._backbone: DraftingBackbone | ModelBackbone = ModelBackbone(drafter)
        if weights is not None:
            self._backbone = self._made("backbone", weights, partial(DraftingBackbone, drafter, products, dtype))
        self._head: DraftingHead | None = None
        if (encoder := drafter.prefix_encoder) is not None:
            first, self._out = effective_weight(drafter.embed_proj[0]), effective_weight(drafter.embed_proj[2])
            sources: list[Any] = [first, *DraftingHead.sources(encoder)]
            self._head = self._made("head", sources, partial(DraftingHead, encoder, first, products))
        mask = target.embed(torch.tensor([self.config.mask_token_id]), self._like)
        self._masks = mask.expand(self.config.block_size - 1, -1)
        self._token_ids = token_ids = drafter.draft_token_ids
        if token_ids is not None:
            sources = [target.output_head.weight, drafter.d2t]
            self._base_logits = self._made(
                "head rows", sources, lambda: products(target.head_rows(token_ids, self._like))
            )

    def _made(self, purpose: str, sources: list[torch.Tensor], make: Callable[[], T]) -> T:
        """Packing takes longer than a short call: what is packed is kept for the next one."""
        return kept(self.drafter, purpose, sources, make) if self._packed else make()

    @_outside_autocast
    def observe(self, tapped_BST: torch.Tensor, counts: list[int]) -> None:
        """Adds verified positions to the context.

        Args:
            tapped_BST: the target's tapped states `[B, n, M·H]`.
            counts: how many of the n positions each sequence keeps: its first ones.
        """
        if not self._seen:
            self._seen = [0] * len(counts)
        # Rotary attention sees differences only, so counting what was observed does for absolute positions.
        keys_values = self._backbone.context_keys_values(
            tapped_BST.to(self._like), self._positions(tapped_BST.shape[1])
        )
        self.memory.append(keys_values, counts, self.config.block_size)
        self._seen = [seen + count for seen, count in zip(self._seen, counts, strict=True)]

    def select(self, rows: list[int]) -> None:
        """Keeps these sequences only."""
        self.memory.select(rows)
        self._seen = [self._seen[row] for row in rows]

    def block_states(self, anchors_B: torch.Tensor) -> torch.Tensor:
        """Block states `[B, K, H]` of the blocks that start at these anchor tokens."""
        rows = self.config.block_size
        anchor = self.target.embed(anchors_B[:, None], self._like)
        embeds = torch.cat([anchor, self._masks.expand(anchor.shape[0], -1, -1)], dim=1)
        masks = {}
        for layer_type in set(self.config.layer_types):
            window = self.config.sliding_window if layer_type == "sliding_attention" else None
            masks[layer_type] = self.memory.attention_mask(rows, window, self._like)
        return self._backbone.block_states(embeds, self._positions(rows), self.memory, masks)

    def _positions(self, count: int) -> torch.Tensor:
        """The next `count` positions of each sequence, `[B, count]`."""
        device = self._like.device
        return torch.tensor(self._seen, device=device)[:, None] + torch.arange(count, device=device)

    @torch.no_grad()
    @_outside_autocast
    def propose(self, anchors_B: torch.Tensor, depth: int, width: int, nodes: int | None = None) -> DraftLevels:
        """Draft nodes after the anchors: at each level the `width` most probable paths.

        A path's probability never rises with its length, so the n <= width most probable nodes of all levels are the
        n that best-first search (DominoTree, arXiv:2607.08642) would pop. `width` 1 is the greedy chain.

        Args:
            anchors_B: the last decided token of each sequence.
            depth: levels, at most J.
            nodes: how many of all levels are wanted. One of level j brings its j - 1 ancestors, so no more than
                `nodes - j + 1` can be of that level, and no more are looked for.
        """
        hidden, pool = self.candidates(anchors_B, depth)
        anchors_B = anchors_B.to(hidden.device)
        if width == 1:
            return self._chain(anchors_B, self._paths(hidden, pool), pool)
        widths = [width if nodes is None else min(width, nodes - j) for j in range(hidden.shape[1])]
        return self._tree(anchors_B, self._paths(hidden, pool.with_rest()), pool.ids, [w for w in widths if w > 0])

    def candidates(self, anchors_B: torch.Tensor, depth: int) -> tuple[torch.Tensor, "_Pool"]:
        """The backbone's part of a draft: states `[B, J, H]` of the first `depth` positions, and candidates there."""
        first = self.config.row_offset
        hidden = self.block_states(anchors_B)[:, first : first + min(depth, self.config.max_drafts)]
        hidden = hidden.contiguous()  # products of a strided slice are run as batched ones, several times slower
        return hidden, self._candidate_pool(hidden)

    def _chain(self, anchors_B: torch.Tensor, paths: "_Paths", pool: "_Pool") -> DraftLevels:
        sequences = torch.arange(anchors_B.shape[0], device=anchors_B.device)
        tokens, scores, choices = [anchors_B], [], []
        for j, ids in enumerate(pool.ids.unbind(1)):
            scores.append(paths.scores(j, tokens[j]))
            choices.append(scores[j].argmax(-1))
            tokens.append(ids[sequences, choices[j]])
        # Nothing above needs probabilities, so they are taken of all levels at once.
        scores_BDC = torch.stack(scores, dim=1)
        logprobs = (scores_BDC if pool.rest is None else torch.cat([scores_BDC, pool.rest], dim=-1)).log_softmax(-1)
        chosen = logprobs.gather(2, torch.stack(choices, dim=1)[..., None]).cumsum(1)
        tokens_BD1 = torch.stack(tokens[1:], dim=1)[..., None]
        return DraftLevels(tokens_BD1, torch.zeros_like(tokens_BD1), chosen)

    def _tree(self, anchors_B: torch.Tensor, paths: "_Paths", ids_BJC: torch.Tensor, widths: list[int]) -> DraftLevels:
        batch, size, depth = ids_BJC.shape[0], ids_BJC.shape[2], len(widths)
        first_path = torch.arange(batch, device=anchors_B.device)[:, None]
        tokens, path_logprobs = anchors_B[:, None], torch.zeros(batch, 1, device=anchors_B.device)
        levels: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
        for j, (ids, width) in enumerate(zip(ids_BJC.unbind(1), widths)):
            frontier = tokens.shape[1]
            after = paths.scores(j, tokens.flatten()).log_softmax(-1)[:, :size]
            logprobs = (path_logprobs.view(-1, 1) + after).view(batch, -1)
            path_logprobs, best = logprobs.topk(min(width, logprobs.shape[1]), dim=-1)
            parents, choices = best // size, best % size
            if j + 1 < depth:
                paths.select(parents[0] if batch == 1 else (parents + first_path * frontier).flatten())
            tokens = ids.gather(1, choices)
            levels.append((tokens, parents, path_logprobs))
        most = max(level[0].shape[1] for level in levels)
        padded = [[_padded(part, most, fill) for part, fill in zip(level, (0, 0, -torch.inf))] for level in levels]
        return DraftLevels(*(torch.stack(parts, dim=1) for parts in zip(*padded)))

    def _paths(self, hidden_BJH: torch.Tensor, pool: "_Pool") -> "_Paths":
        embed = partial(self.target.embed, like=self._like)
        return _Paths(self._head, self.config.pure_draft_prefix_len, embed, hidden_BJH, pool)

    def _candidate_pool(self, hidden_BJH: torch.Tensor) -> "_Pool":
        rows = hidden_BJH.flatten(0, 1)
        logits = self.target.base_logits(rows) if self._token_ids is None else self._base_logits(rows).float()
        logits = logits.view(*hidden_BJH.shape[:2], -1)
        if self.temperature != 1.0:
            logits = logits / self.temperature
        whole = logits.shape[-1]
        size = min(self.config.candidate_pool_size or whole, whole)
        if size == whole:
            indices = torch.arange(size, device=logits.device).expand(logits.shape)
            base, rest = logits, None
        else:
            total = logits.logsumexp(-1, keepdim=True)
            base, indices = logits.topk(size, dim=-1)
            inside = (base.logsumexp(-1, keepdim=True) - total).exp()
            rest = total + torch.log1p(-inside.clamp_max(1 - 1e-6))
        ids = indices if self._token_ids is None else self._token_ids[indices]
        out = None
        if self._head is not None:
            out = (self._out if rest is None else self._out[indices]).float()
            out = out if self.temperature == 1.0 else out / self.temperature
        return _Pool(ids, base, rest, out)


class _Paths:
    """The paths of a frontier, and the scores of what may follow them: base logits, corrected where there is a head.

    N paths stand in rows, those of a sequence together, as many for each of B sequences.
    """

    def __init__(
        self,
        head: DraftingHead | None,
        num_pure: int,
        embed: Callable[[torch.Tensor], torch.Tensor],
        hidden_BJH: torch.Tensor,
        pool: "_Pool",
    ):
        self._head, self._num_pure, self._embed = head, num_pure, embed
        self._batch = hidden_BJH.shape[0]
        self._base = pool.base.unbind(1)
        if head is not None and pool.out is not None:
            self._hidden = hidden_BJH.unbind(1)
            self._from_hidden = head.from_hidden(hidden_BJH).unbind(1)
            if pool.out.ndim == 2:
                self._out: Sequence[torch.Tensor] = [pool.out.T] * len(self._base)
            else:  # a batched product of one costs several times a plain one on CPUs
                self._out = pool.out[0].mT.unbind() if self._batch == 1 else pool.out.mT.unbind(1)
            self._memory = head.steps.start(self._batch, hidden_BJH)

    def scores(self, j: int, tokens_N: torch.Tensor) -> torch.Tensor:
        """Scores of position j's candidates after paths that end in these tokens, `[N, C]`."""
        times = tokens_N.shape[0] // self._batch
        base = _spread(self._base[j], times)
        if self._head is None:
            return base
        hidden = _spread(self._hidden[j], times)
        added, self._memory = self._head.steps.step(self._embed(tokens_N), hidden, self._memory)
        if j < self._num_pure:
            return base
        features = F.silu(_spread(self._from_hidden[j], times) + added).float()
        if self._out[j].ndim == 2:
            return torch.addmm(base, features, self._out[j])
        return base + torch.bmm(features.view(self._batch, times, -1), self._out[j]).flatten(0, 1)

    def select(self, rows: torch.Tensor) -> None:
        """Goes on with these paths."""
        if self._head is not None:
            self._memory = self._head.steps.select(self._memory, rows)


def _spread(part_BX: torch.Tensor, times: int) -> torch.Tensor:
    """Each sequence's row once for each of its paths; one sequence's is left to broadcasting."""
    return part_BX if times == 1 or part_BX.shape[0] == 1 else part_BX.repeat_interleave(times, dim=0)


@dataclass
class _Pool:
    """Candidates of all draft positions: what the head rescores.

    ids: token ids `[B, J, C]`. base: base logits, in float32. rest: log-mass outside the pool `[B, J, 1]`, which stays
    as the base logits have it; `None` where the pool is all of V. out: the head's last matrix at the candidates
    `[B, J, C, R]`, or all of it `[V, R]`.
    """

    ids: torch.Tensor
    base: torch.Tensor
    rest: torch.Tensor | None
    out: torch.Tensor | None

    def with_rest(self) -> "_Pool":
        """With the rest as one more candidate, which the head does not correct, so that a softmax counts it."""
        if self.rest is None:
            return self
        base = torch.cat([self.base, self.rest], dim=-1)
        return replace(self, base=base, out=None if self.out is None else F.pad(self.out, (0, 0, 0, 1)))


def _padded(part_BN: torch.Tensor, most: int, fill: float) -> torch.Tensor:
    missing = most - part_BN.shape[1]
    return part_BN if missing == 0 else F.pad(part_BN, (0, missing), value=fill)
