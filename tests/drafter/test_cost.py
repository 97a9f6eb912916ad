"""How much is verified follows from the times measured and the probabilities of the drafts."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_domino.drafter.cost_domino import RoundCosts, round_costs
from tests.tiny import tiny_drafter, tiny_target


def measured(seconds_of_rows: dict[int, float], draft_seconds: float = 0.0, max_rows: int = 17) -> RoundCosts:
    costs = RoundCosts(max_rows)
    for rows, seconds in seconds_of_rows.items():
        for _ in range(3):
            costs.record_verify(rows, seconds)
    costs.record_draft(draft_seconds)
    return costs


def test_times_between_measured_ones_are_interpolated():
    costs = measured({1: 1.0, 5: 1.4, 17: 3.8})
    assert costs.verify_seconds(1) == 1.0
    assert costs.verify_seconds(3) == pytest.approx(1.2)
    assert costs.verify_seconds(11) == pytest.approx(2.6)


@given(st.dictionaries(st.integers(1, 20), st.floats(0.01, 5.0), min_size=1, max_size=6))
def test_more_rows_never_seem_cheaper(seconds_of_rows):
    costs = measured(seconds_of_rows)
    times = [costs.verify_seconds(rows) for rows in range(1, 25)]
    assert all(later >= earlier - 1e-9 for earlier, later in zip(times, times[1:], strict=False))


def test_a_slow_outlier_changes_nothing():
    costs = measured({1: 1.0, 4: 1.1, 17: 1.5})
    costs.record_verify(4, 60.0)
    assert costs.verify_seconds(4) == 1.1


def test_one_row_and_some_are_tried_before_anything_is_judged():
    costs, tried = RoundCosts(17), []
    while (rows := costs.unmeasured(17)) is not None:
        tried.append(rows)
        costs.record_verify(rows, 1.0)
    assert sorted(set(tried)) == [1, 4] and len(tried) < 7
    assert RoundCosts(17).unmeasured(3) == 1  # never more rows than there are


def test_many_rows_are_tried_where_some_were_cheap_and_judged_by_their_second_time():
    probabilities = [0.9 - 0.05 * i for i in range(16)]
    costs = measured({1: 1.0, 4: 1.02})
    for _ in range(2):  # the first time says little: kernels are being prepared
        assert costs.worthwhile(probabilities) == 16
        costs.record_verify(17, 50.0)
    assert costs.worthwhile(probabilities) < 5
    dear = measured({1: 1.0, 4: 4.0})
    assert dear.worthwhile(probabilities) < 3


def test_drafting_is_judged_against_rounds_without_it():
    costs = measured({1: 1.0, 4: 1.2})
    for _ in range(4):
        costs.record_round(True, 4, tokens=2.0, seconds=1.5)
    assert costs.drafting_pays
    for _ in range(4):  # the text itself offers as much, and costs less
        costs.record_round(False, 1, tokens=2.0, seconds=1.1)
    assert not costs.drafting_pays


def test_drafting_that_does_not_pay_is_paused_after_a_trial_and_longer_each_time():
    costs = measured({1: 1.0, 4: 1.2})
    pauses = []
    while len(pauses) < 5:
        costs.record_round(True, 4, tokens=1.0, seconds=1.5)
        if costs.pause:
            pauses.append(costs.pause)
    assert pauses == sorted(pauses) and pauses[0] < pauses[1] and pauses[-1] == pauses[-2] == 64
    costs.record_round(True, 4, tokens=1.0, seconds=1.5)
    assert costs.pause == 0  # a new trial is more than one round
    for _ in range(30):
        costs.record_round(True, 4, tokens=4.0, seconds=1.5)
    assert costs.drafting_pays and costs.pause == 0


def test_rounds_in_which_kernels_were_prepared_are_no_evidence():
    costs = measured({1: 1.0})
    for _ in range(20):
        costs.record_round(True, 9, tokens=1.0, seconds=90.0)
    assert costs.drafting_pays and costs.pause == 0


def test_cheap_rows_are_filled_and_dear_ones_are_not():
    probabilities = [0.6, 0.4, 0.3, 0.2, 0.1, 0.05] + [0.01] * 10
    free = measured({1: 1.0, 4: 1.0, 17: 1.0})
    dear = measured({1: 1.0, 4: 4.0, 17: 17.0})
    between = measured({1: 1.0, 4: 1.3, 17: 2.6})
    assert free.worthwhile(probabilities) == len(probabilities)
    assert dear.worthwhile(probabilities) == 0
    assert 2 <= between.worthwhile(probabilities) <= 6


@given(st.lists(st.floats(0, 1), min_size=1, max_size=16), st.floats(0.0, 0.3), st.floats(0.0, 1.0))
def test_no_other_number_gives_more_text_per_second(probabilities, slope, draft_seconds):
    costs = measured({1: 1.0, 4: 1.0 + 3 * slope, 17: 1.0 + 16 * slope}, draft_seconds)
    probabilities.sort(reverse=True)

    def rate(count: int) -> float:
        return (1 + sum(probabilities[:count])) / (draft_seconds + costs.verify_seconds(count + 1))

    chosen = costs.worthwhile(probabilities)
    assert all(rate(chosen) >= rate(count) - 1e-9 for count in range(len(probabilities) + 1))


def test_costs_belong_to_a_pair_and_a_batch_size():
    target = tiny_target()
    drafter, other = tiny_drafter(target), tiny_drafter(target)
    assert round_costs(target, drafter) is round_costs(target, drafter, 1)
    assert round_costs(target, drafter) is not round_costs(target, drafter, 2)
    assert round_costs(target, drafter) is not round_costs(target, other)
