"""How much is verified follows from the times measured and the probabilities of the drafts."""

import random
import sys
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_domino.drafter.cost_domino import RoundCosts, round_costs
from tests.tiny import tiny_drafter, tiny_target


def measured(
    seconds_of_rows: dict[int, float], draft_seconds: float = 0.0, max_rows: int = 17, tile: float = 1
) -> RoundCosts:
    costs = RoundCosts(max_rows, tile)
    for rows, seconds in seconds_of_rows.items():
        for _ in range(3):
            costs.record_verify(rows, seconds)
    for _ in range(2):
        costs.record_draft(draft_seconds)
    return costs


def test_times_of_several_rows_are_on_a_line_and_that_of_one_is_its_own():
    costs = measured({1: 1.0, 5: 1.4, 17: 3.8, 29: 6.2})
    assert costs.verify_seconds(1) == 1.0
    assert costs.verify_seconds(11) == pytest.approx(2.6, abs=0.01)
    assert costs.verify_seconds(23) == pytest.approx(5.0, abs=0.02)
    only = measured({1: 1.0, 5: 1.4})  # one number of rows has no slope of its own
    assert only.verify_seconds(5) == pytest.approx(1.4)
    assert only.verify_seconds(6) == pytest.approx(1.5)


def test_one_row_and_few_tokens_are_never_dearer_than_more():
    costs = measured({1: 2.0, 2: 1.0, 3: 1.5})
    assert costs.verify_seconds(1) <= costs.verify_seconds(2) <= costs.verify_seconds(3)


@given(st.dictionaries(st.integers(1, 20), st.floats(0.01, 5.0), min_size=1, max_size=6), st.sampled_from([1, 1.5, 6]))
def test_more_rows_never_seem_cheaper(seconds_of_rows, tile):
    costs = measured(seconds_of_rows, tile=tile)
    times = [costs.verify_seconds(rows) for rows in range(1, 25)]
    assert all(later >= earlier - 1e-9 for earlier, later in zip(times, times[1:], strict=False))


@pytest.mark.parametrize("batch_size", [1, 2])
def test_rows_of_products_by_the_tile_are_verified_by_the_tile(batch_size):
    """Where the first row of a tile is dear and the others cheap, drafts end with a tile."""
    tile, chosen = 6 // batch_size, set()
    for decay in (0.6, 0.8, 0.9, 0.97):
        costs = RoundCosts(17, tile)
        for rows in (1, 2, 4, 6, 8, 11, 14, 17):
            for _ in range(3):
                costs.record_verify(rows, 1.0 + 0.03 * rows + 0.03 * tile * -(-rows // tile))
        chosen.add(1 + costs.worthwhile([0.9 * decay**i for i in range(16)]))
        step = costs.verify_seconds(tile + 1) - costs.verify_seconds(tile)
        assert step > 2 * (costs.verify_seconds(2 * tile) - costs.verify_seconds(2 * tile - 1)) > 0
    assert len(chosen) > 1 and all(rows % tile == 0 or rows == 17 for rows in chosen)


def test_scattered_times_hardly_move_the_line():
    noise, costs = random.Random(0), RoundCosts(17)
    for i in range(84):
        rows = 1 + i % 12
        costs.record_verify(rows, noise.lognormvariate(0, 0.15) * (1.0 + 0.1 * (rows - 1)))
    for rows in range(2, 13):  # one median of seven is off by 6 % in the mean, and by 15 % now and then
        assert costs.verify_seconds(rows) == pytest.approx(1.0 + 0.1 * (rows - 1), rel=0.08)


def test_rows_measured_often_weigh_more():
    often, seldom = RoundCosts(17), RoundCosts(17)
    for costs, times in ((often, 7), (seldom, 2)):
        for rows, seconds, count in ((4, 1.0, 7), (10, 1.0, 7), (16, 4.0, times)):
            for _ in range(count):
                costs.record_verify(rows, seconds)
    assert often.verify_seconds(16) > seldom.verify_seconds(16) * 1.1


def test_no_time_is_below_those_measured():
    costs = RoundCosts(17)
    for rows, seconds in ((4, 0.1), (16, 10.0)):
        for _ in range(2):
            costs.record_verify(rows, seconds)
    assert costs.verify_seconds(1) == costs.verify_seconds(2) == 0.1
    for _ in range(7):
        costs.record_verify(1, 0.0)
    assert costs.verify_seconds(1) > 0


def test_a_slow_outlier_changes_nothing():
    costs = measured({1: 1.0, 4: 1.1, 17: 1.5})
    before = costs.verify_seconds(4)
    costs.record_verify(4, 60.0)
    assert costs.verify_seconds(4) == pytest.approx(before, rel=0.03)


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
        assert (many := costs.worthwhile(probabilities)) > 12
        costs.record_verify(many + 1, 50.0)
    assert costs.worthwhile(probabilities) < 5
    dear = measured({1: 1.0, 4: 4.0})
    assert dear.worthwhile(probabilities) < 3


def test_drafting_is_judged_against_rounds_without_it():
    costs = measured({1: 1.0, 4: 1.2})
    for _ in range(4):
        costs.record_round(True, 4, tokens=2.0)
    assert costs.drafting_pays
    for _ in range(4):  # the text itself offers as much, and costs less
        costs.record_round(False, 1, tokens=2.0)
    assert not costs.drafting_pays


def test_text_that_promises_more_than_drafting_gives_suffices():
    costs = measured({1: 1.0, 4: 1.2, 6: 1.3}, draft_seconds=0.3)
    sure, unsure = [0.9, 0.8, 0.7, 0.6, 0.5], [0.2, 0.05]
    assert not costs.suffices(sure), "nothing is known of drafting"
    for _ in range(4):
        costs.record_round(True, 6, tokens=2.0)
    assert costs.suffices(sure) and not costs.suffices(unsure) and not costs.suffices([])
    useless = measured({1: 1.0, 4: 1.2, 6: 1.3}, draft_seconds=0.3)
    for _ in range(4):
        useless.record_round(True, 6, tokens=1.0)
    assert useless.suffices(sure)
    assert not useless.suffices(unsure) and not useless.suffices([]), "else drafting would never be tried again"


def test_drafting_that_does_not_pay_is_paused_after_a_trial_and_longer_each_time():
    costs = measured({1: 1.0, 4: 1.2})
    pauses = []
    while len(pauses) < 5:
        costs.record_round(True, 4, tokens=1.0)
        if costs.pause:
            pauses.append(costs.pause)
    assert pauses == sorted(pauses) and pauses[0] < pauses[1] and pauses[-1] == pauses[-2] == 64
    costs.record_round(True, 4, tokens=1.0)
    assert costs.pause == 0  # a new trial is more than one round
    for _ in range(30):
        costs.record_round(True, 4, tokens=4.0)
    assert costs.drafting_pays and costs.pause == 0


def test_a_slow_first_draft_is_no_evidence():
    costs = RoundCosts(17)
    for rows in (1, 1, 4, 4):
        costs.record_verify(rows, 1.0)
    for seconds in [90.0] + 9 * [0.1]:  # at first weights are packed and kernels prepared
        costs.record_draft(seconds)
        costs.record_round(True, 4, tokens=2.0)
        assert costs.drafting_pays and costs.pause == 0


def test_plain_rounds_come_first():
    costs = RoundCosts(17)
    due = []
    while costs.plain_rounds_due:
        due.append(costs.plain_rounds_due)
        costs.record_verify(1, 1.0)
    assert due == [2, 1]


def test_probabilities_are_corrected_by_what_was_accepted():
    costs = RoundCosts(17)
    assert costs.calibration == 1.0
    for _ in range(5):
        costs.record_acceptance(expected=2.0, accepted=1.0)
    assert costs.calibration == pytest.approx(0.73, abs=0.03)  # a few rounds say something, not all
    for _ in range(300):
        costs.record_acceptance(expected=2.0, accepted=1.0)
    assert costs.calibration == pytest.approx(0.5, rel=0.05)
    for _ in range(3000):
        costs.record_acceptance(expected=1.0, accepted=0.0)
    assert costs.calibration > 0  # or nothing would ever be tried again
    for _ in range(300):
        costs.record_acceptance(expected=1.0, accepted=1.2)
    assert costs.calibration == 1.0


def test_a_trial_verifies_something():
    costs = measured({1: 1.0, 4: 4.0})
    hopeless = [0.01, 0.005]
    assert costs.worthwhile(hopeless) == 0
    rounds = 0
    while not costs.pause:
        costs.record_round(True, 4, tokens=1.0)
        rounds += 1
        if rounds >= 3:  # from then on there is a judgement, and a trial
            assert costs.worthwhile(hopeless) == 1
    assert rounds == 6
    assert costs.worthwhile(hopeless) == 1
    assert costs.worthwhile(hopeless, drafted=False) == 0 and costs.worthwhile([]) == 0


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


def test_threads_may_record_while_others_read():
    costs, done = RoundCosts(17), threading.Event()

    def record() -> None:
        for i in range(20000):
            costs.record_verify(1 + i % 2000, 1.0)
            costs.record_draft(0.1)
        done.set()

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        (thread := threading.Thread(target=record)).start()
        while not done.is_set():
            assert costs.verify_seconds(5) > 0 and costs.draft_seconds >= 0
        thread.join()
    finally:
        sys.setswitchinterval(interval)


def test_costs_belong_to_a_pair_a_batch_size_and_a_magnitude_of_context():
    target = tiny_target()
    drafter, other = tiny_drafter(target), tiny_drafter(target)
    assert round_costs(target, drafter) is round_costs(target, drafter, 1)
    assert round_costs(target, drafter) is not round_costs(target, drafter, 2)
    assert round_costs(target, drafter) is not round_costs(target, other)
    ranges = [(0, 511), (512, 1023), (1024, 2047), (4096, 8191)]
    kept = [{id(round_costs(target, drafter, context=length)) for length in ends} for ends in ranges]
    assert all(len(ids) == 1 for ids in kept) and len(set.union(*kept)) == len(ranges)
