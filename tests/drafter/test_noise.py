"""The random numbers of plain sampling."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hf_domino.drafter.noise_domino import SamplingNoise


def plain_choices(probabilities_TBV: torch.Tensor) -> list[list[int]]:
    return [torch.multinomial(step, num_samples=1)[:, 0].tolist() for step in probabilities_TBV]


@given(st.integers(1, 4), st.integers(1, 6), st.integers(0, 10**6), st.data())
def test_rows_in_any_order_draw_what_whole_batches_draw(batch, steps, seed, data):
    torch.manual_seed(seed)
    probabilities = torch.randn(steps, batch, 23).mul(2).softmax(-1)
    torch.manual_seed(seed + 1)
    expected, state = plain_choices(probabilities), None
    state = torch.get_rng_state()

    torch.manual_seed(seed + 1)
    noise, reached = SamplingNoise(batch), [0] * batch
    while any(step < steps for step in reached):
        row = data.draw(st.sampled_from([row for row in range(batch) if reached[row] < steps]))
        step = reached[row]
        assert noise.choose(probabilities[step, row], row, step) == expected[step][row]
        reached[row] += 1
        noise.forget(min(reached))
    assert torch.equal(torch.get_rng_state(), state)


def test_passed_steps_are_freed_and_later_ones_kept():
    noise, uniform = SamplingNoise(2), torch.full((5,), 0.2)
    for step in range(4):
        noise.choose(uniform, 0, step)
    noise.forget(3)
    assert [drawn is None for drawn in noise._drawn] == [True, True, True, False]


def test_nan_is_an_error():
    with pytest.raises(RuntimeError, match="nan"):
        SamplingNoise(1).choose(torch.tensor([0.5, float("nan"), 0.5]), 0, 0)
