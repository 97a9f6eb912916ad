"""The drafter's memory of the target's context: keys and values of every verified position, written once.

The memory stands in for a transformers cache in the drafter's attention layers (`update`), with one difference: what
`update` is given, the block's keys and values, is lent room behind the context for that one forward and not kept.
"""

from dataclasses import dataclass

import torch


class ContextMemory:
    """Keys and values of all layers, for B sequences of different lengths.

    The buffer grows geometrically and is written in place, so a round copies only what is new. With a window, each
    sequence keeps its last `window` positions; they keep the rotation of their absolute position.

    Args:
        window: context positions a sequence keeps, or `None` for all.
    """

    def __init__(self, window: int | None = None):
        self.window = window
        self.lengths: list[int] = []
        self._buffer: torch.Tensor | None = None  # [L, 2, B, heads, capacity, head_dim]: keys and values
        self._views: _Views | None = None

    @property
    def longest(self) -> int:
        return max(self.lengths, default=0)

    @property
    def first(self) -> int:
        """First column that any sequence still attends to."""
        return max(0, min(self.lengths, default=0) - self.window) if self.window else 0

    def append(self, keys_values: torch.Tensor, counts: list[int], block_rows: int) -> None:
        """Adds new positions.

        Args:
            keys_values: of L layers `[L, 2, B, heads, n, head_dim]`, keys rotated.
            counts: how many of the n belong to each sequence: its first ones.
            block_rows: room to keep free behind the context for the block.
        """
        if not self.lengths:
            self.lengths = [0] * len(counts)
        if self.window and self.longest > 2 * self.window + block_rows:
            self._drop_out_of_window()
        grown = [length + count for length, count in zip(self.lengths, counts, strict=True)]
        buffer = self._reserve(keys_values, max(grown) + block_rows)
        for row, (length, count) in enumerate(zip(self.lengths, counts, strict=True)):
            buffer[:, :, row, :, length : length + count] = keys_values[:, :, row, :, :count]
        self.lengths, self._views = grown, None

    def update(self, keys: torch.Tensor, values: torch.Tensor, layer_idx: int, *args, **kwargs):
        """Context and block together, `[B, heads, longest - first + K, head_dim]`, without keeping the block."""
        if self._views is None or self._views.block_rows != keys.shape[2]:
            self._views = self._views_with(keys.shape[2])
        views = self._views
        views.block_keys[layer_idx].copy_(keys)
        views.block_values[layer_idx].copy_(values)
        # Layers of one drafter may lie on several devices; the memory does not.
        return views.keys[layer_idx].to(keys.device), views.values[layer_idx].to(keys.device)

    def attention_mask(self, block_rows: int, sliding_window: int | None, like: torch.Tensor) -> torch.Tensor | None:
        """Additive mask `[B, 1, K, longest - first + K]`, or `None` where every row sees every column.

        Args:
            sliding_window: of the layer, or `None`: row i of the block then sees context less than that many
                positions before it.
        """
        if len(set(self.lengths)) == 1 and (sliding_window is None or self.longest + block_rows <= sliding_window):
            return None
        device = like.device
        columns = torch.arange(self.first, self.longest, device=device)
        lengths = torch.tensor(self.lengths, device=device)[:, None, None]
        distance = lengths - columns  # from the anchor; 0 or less: not this sequence's context
        visible = (distance > 0) & (distance <= (self.window or self.longest))
        rows = torch.arange(block_rows, device=device)[:, None]
        if sliding_window is not None:
            visible = visible & (distance + rows < sliding_window)
        visible = visible.expand(-1, block_rows, -1)
        visible = torch.cat([visible, visible.new_ones(visible.shape[0], block_rows, block_rows)], dim=-1)
        mask = torch.zeros(visible.shape, dtype=like.dtype, device=device)
        return mask.masked_fill_(~visible, torch.finfo(like.dtype).min)[:, None]

    def select(self, rows: list[int]) -> None:
        """Keeps these sequences only, in this order."""
        self.lengths = [self.lengths[row] for row in rows]
        self._buffer, self._views = None if self._buffer is None else self._buffer[:, :, rows], None

    def _views_with(self, block_rows: int) -> "_Views":
        assert self._buffer is not None
        context = self._buffer[..., self.first : self.longest + block_rows, :].unbind(1)
        block = self._buffer[..., self.longest : self.longest + block_rows, :].unbind(1)
        return _Views(block_rows, *(part.unbind() for part in (*context, *block)))

    def _reserve(self, like: torch.Tensor, needed: int) -> torch.Tensor:
        """The buffer, with room for `needed` positions."""
        capacity = 0 if self._buffer is None else self._buffer.shape[-2]
        if self._buffer is None or needed > capacity:
            grown = like.new_zeros(*like.shape[:-2], max(needed, 2 * capacity), like.shape[-1])
            if self._buffer is not None:
                grown[..., : self.longest, :] = self._buffer[..., : self.longest, :]
            self._buffer = grown
        return self._buffer

    def _drop_out_of_window(self) -> None:
        assert self._buffer is not None and self.window is not None
        drops = [max(0, length - self.window) for length in self.lengths]
        for row, (drop, length) in enumerate(zip(drops, self.lengths, strict=True)):
            kept = self._buffer[:, :, row, :, drop:length].clone()
            self._buffer[:, :, row, :, : length - drop] = kept
        self.lengths = [length - drop for length, drop in zip(self.lengths, drops, strict=True)]


@dataclass
class _Views:
    """Parts of the buffer by layer: all that a block sees, itself included, and its own room."""

    block_rows: int
    keys: tuple[torch.Tensor, ...]
    values: tuple[torch.Tensor, ...]
    block_keys: tuple[torch.Tensor, ...]
    block_values: tuple[torch.Tensor, ...]
