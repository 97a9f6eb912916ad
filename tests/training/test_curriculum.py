"""λ over training."""

import pytest

from hf_domino.training.curriculum import Curriculum


def test_two_phases():
    curriculum = Curriculum(base_share=0.2, handover_share=0.5, end=0.1)
    values = [curriculum.weight(p) for p in (0.0, 0.19, 0.2, 0.45, 0.7, 1.0)]
    assert values == pytest.approx([1.0, 1.0, 1.0, 0.55, 0.1, 0.1])


@pytest.mark.parametrize(
    ("shares", "wanted"),
    [((0, 0, 0), 0.0), ((1, 0.5, 0), 1.0), ((1, 0, 0), 1.0), ((0, 0, 0.3), 0.3)],
    ids=["final only", "base only", "base only, without a hand-over", "fixed mix: no anchoring"],
)
def test_ablations(shares, wanted):
    assert [Curriculum(*shares).weight(p) for p in (0.0, 0.5, 1.0)] == [wanted] * 3


def test_hand_over_from_the_start():
    assert Curriculum(0, 1, 0).weight(0.25) == pytest.approx(0.75)


@pytest.mark.parametrize("shares", [(-0.1, 0.5, 0), (0.2, 1.5, 0), (0.2, 0.5, 2), (0.6, 0.6, 0)])
def test_impossible_values_are_refused(shares):
    with pytest.raises(ValueError, match="curriculum"):
        Curriculum(*shares)
