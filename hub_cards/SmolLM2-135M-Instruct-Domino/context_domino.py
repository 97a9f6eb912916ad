"""The drafter's memory of the target's context: keys and values of every verified position, written once.

The memory stands in for a transformers cache in the drafter's attention layers (`update`), with one difference: what
`update` is given, the block's keys and values, is lent room behind the context for that one forward and not kept.
"""

import torch


class ContextMemory:
    """Keys and values per layer, for B sequences of different lengths.

    Buffers grow geometrically and rows are written in place, so a round copies only what is new. With a window, each
    sequence keeps its last `window` positions; they keep the rotation of their absolute position.

    Args:
        num_layers: layers of the drafter.
        window: context positions a sequence keeps, or `None` for all.
    """

    def __init__(self, num_layers: int, window: int | None = None):
        self.window = window
        self.lengths: list[int] = []
        self._buffers: list[list[torch.Tensor]] = [[] for _ in range(num_layers)]

    @property
    def longest(self) -> int:
        return max(self.lengths, default=0)

    @property
    def first(self) -> int:
        """First column that any sequence still attends to."""
        return max(0, min(self.lengths, default=0) - self.window) if self.window else 0

    def append(self, keys_values: list[tuple[torch.Tensor, torch.Tensor]], counts: list[int], block_rows: int) -> None:
        """Adds new positions.

        Args:
            keys_values: per layer, keys and values `[B, heads, n, head_dim]`, rotated.
            counts: how many of the n belong to each sequence: its first ones.
            block_rows: room to keep free behind the context for the block.
        """
        if not self.lengths:
            self.lengths = [0] * len(counts)
        if self.window and self.longest > 2 * self.window + block_rows:
            self._drop_out_of_window()
        needed = max(length + count for length, count in zip(self.lengths, counts, strict=True)) + block_rows
        for buffers, new in zip(self._buffers, keys_values, strict=True):
            self._reserve(buffers, new, needed)
            for buffer, states in zip(buffers, new, strict=True):
                for row, (length, count) in enumerate(zip(self.lengths, counts, strict=True)):
                    buffer[row, :, length : length + count] = states[row, :, :count]
        self.lengths = [length + count for length, count in zip(self.lengths, counts, strict=True)]

    def update(self, keys: torch.Tensor, values: torch.Tensor, layer_idx: int, *args, **kwargs):
        """Context and block together, `[B, heads, longest - first + K, head_dim]`, without keeping the block."""
        end = self.longest + keys.shape[2]
        for buffer, states in zip(self._buffers[layer_idx], (keys, values), strict=True):
            buffer[:, :, self.longest : end] = states
        return tuple(buffer[:, :, self.first : end] for buffer in self._buffers[layer_idx])

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
        self._buffers = [[buffer[rows] for buffer in buffers] for buffers in self._buffers]

    def _reserve(self, buffers: list[torch.Tensor], new: tuple[torch.Tensor, torch.Tensor], needed: int) -> None:
        capacity = buffers[0].shape[2] if buffers else 0
        if needed <= capacity:
            return
        grown = [states.new_zeros(*states.shape[:2], max(needed, 2 * capacity), states.shape[3]) for states in new]
        for old, buffer in zip(buffers, grown):
            buffer[:, :, : self.longest] = old[:, :, : self.longest]
        buffers[:] = grown

    def _drop_out_of_window(self) -> None:
        drops = [max(0, length - self.window) for length in self.lengths]
        for buffers in self._buffers:
            for buffer in buffers:
                for row, (drop, length) in enumerate(zip(drops, self.lengths, strict=True)):
                    buffer[row, :, : length - drop] = buffer[row, :, drop:length].clone()
        self.lengths = [length - drop for length, drop in zip(self.lengths, drops, strict=True)]
