"""The context memory against a plain list of positions per sequence."""

import pytest
import torch

from hf_domino.drafter.context_domino import ContextMemory

LAYERS, HEADS, WIDTH, BLOCK = 2, 2, 3, 4


class NaiveMemory:
    """Per sequence, a list of (absolute position, per-layer key and value)."""

    def __init__(self, batch):
        self.rows = [[] for _ in range(batch)]

    def append(self, keys_values, counts):
        for b, (row, count) in enumerate(zip(self.rows, counts, strict=True)):
            for i in range(count):
                row.append((len(row), keys_values[:, :, b, :, i]))

    def visible(self, b, block_row, window, sliding):
        """What row `block_row` of the block attends to."""
        anchor = len(self.rows[b])
        return [
            kept
            for position, kept in self.rows[b]
            if (window is None or anchor - position <= window)
            and (sliding is None or anchor + block_row - position < sliding)
        ]


def new_states(batch, count):
    return torch.randn(LAYERS, 2, batch, HEADS, count, WIDTH)


def check(memory, naive, window, sliding):
    batch = len(naive.rows)
    mask = memory.attention_mask(BLOCK, sliding, torch.zeros(1))
    block = new_states(batch, BLOCK)
    for layer in range(LAYERS):
        merged = memory.update(*block[layer], layer)
        seen = torch.ones(batch, 1, BLOCK, merged[0].shape[2], dtype=torch.bool) if mask is None else mask == 0
        assert seen.shape == (batch, 1, BLOCK, merged[0].shape[2])
        for b in range(batch):
            for k in range(BLOCK):
                kept = naive.visible(b, k, window, sliding)
                for part in (0, 1):
                    found = merged[part][b][:, seen[b, 0, k]]
                    own = list(block[layer, part, b].unbind(1))
                    wanted = torch.stack([states[layer, part] for states in kept] + own, dim=1)
                    assert torch.equal(found, wanted)


@pytest.mark.parametrize("window, sliding", [(None, None), (5, None), (1, None), (None, 6), (5, 7), (30, 4), (5, 3)])
def test_one_sequence(window, sliding):
    memory, naive = ContextMemory(window), NaiveMemory(1)
    for count in (3, 1, 4, 1, 1, 2, 7, 1, 1, 5, 1, 3):
        states = new_states(1, count)
        memory.append(states, [count], BLOCK)
        naive.append(states, [count])
        check(memory, naive, window, sliding)


@pytest.mark.parametrize("window, sliding", [(None, None), (5, None), (2, None), (None, 6), (5, 4)])
def test_ragged_rows_and_sequences_that_leave(window, sliding):
    memory, naive = ContextMemory(window), NaiveMemory(3)
    for counts in ([6, 2, 4], [1, 3, 1], [1, 1, 5], [4, 0, 2], [5, 1, 1]):
        states = new_states(3, max(counts))
        memory.append(states, counts, BLOCK)
        naive.append(states, counts)
        check(memory, naive, window, sliding)
    memory.select([2, 0])
    naive.rows = [naive.rows[2], naive.rows[0]]
    for counts in ([2, 1], [1, 6], [3, 3]):
        states = new_states(2, max(counts))
        memory.append(states, counts, BLOCK)
        naive.append(states, counts)
        check(memory, naive, window, sliding)


def test_memory_grows_geometrically_and_stays_where_it_is():
    memory, moves, place = ContextMemory(), 0, None
    for _ in range(400):
        memory.append(new_states(1, 1), [1], BLOCK)
        here = memory._buffer.data_ptr()
        moves, place = moves + (here != place), here
    assert moves <= 9 and memory._buffer.shape[-2] < 2 * 404 + BLOCK


def test_a_window_bounds_the_memory():
    memory = ContextMemory(window=8)
    for _ in range(200):
        memory.append(new_states(1, 3), [3], BLOCK)
    assert memory._buffer.shape[-2] < 64


def test_nothing_of_a_block_is_kept():
    memory = ContextMemory()
    memory.append(new_states(1, 3), [3], BLOCK)
    memory.update(*new_states(1, BLOCK)[0], 0)
    assert memory.lengths == [3]


def test_no_mask_where_all_is_visible():
    memory = ContextMemory()
    memory.append(new_states(2, 3), [3, 3], BLOCK)
    assert memory.attention_mask(BLOCK, None, torch.zeros(1)) is None
    assert memory.attention_mask(BLOCK, 99, torch.zeros(1)) is None
