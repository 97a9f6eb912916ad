"""What a round costs on this machine, as measured, and how many draft tokens are therefore worth verifying."""

import statistics
import weakref
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

from transformers import PreTrainedModel

if TYPE_CHECKING:
    from .modeling_domino import DominoDraftModel

_SAMPLES_KEPT = 7
_SAMPLES_WANTED = 2
_PRIOR_SLOPE = 0.03  # of the time of one row, per further row, until something is measured
_TRIAL = 5  # rounds with drafting that do not pay before it is paused: accepted lengths vary
_LONGEST_PAUSE = 64
_FADED = 0.3
_MEMORY = 0.9  # how much of the evidence on drafting a round keeps of the rounds before


class _Rate:
    """Text per second of one way of decoding, the latest rounds counting most."""

    def __init__(self) -> None:
        self.tokens, self.seconds, self.rounds = 0.0, 0.0, 0

    def record(self, tokens: float, seconds: float) -> None:
        self.tokens = _MEMORY * self.tokens + tokens
        self.seconds = _MEMORY * self.seconds + seconds
        self.rounds += 1

    def fade(self) -> None:
        """Makes room for new evidence."""
        self.tokens, self.seconds = self.tokens * _FADED, self.seconds * _FADED


class RoundCosts:
    """Times of verifying forwards by their number of rows, and what rounds with and without drafting have brought.

    They belong to a target and a drafter on a machine, not to a call: they outlive it, so that only the first call
    has to explore. They decide how much is drafted and never what is emitted.

    Args:
        max_rows: the most rows that a sequence may have in one forward.
    """

    def __init__(self, max_rows: int) -> None:
        # More rows are tried when those measured say that they would pay.
        self._explored = sorted({1, max(2, max_rows // 4)})
        self._verify: dict[int, deque[float]] = {}
        self._draft: deque[float] = deque(maxlen=_SAMPLES_KEPT)
        self._drafted, self._undrafted = _Rate(), _Rate()
        self._trial, self._failures = 0, 0

    def record_verify(self, rows: int, seconds: float) -> None:
        self._verify.setdefault(rows, deque(maxlen=_SAMPLES_KEPT)).append(seconds)

    def record_draft(self, seconds: float) -> None:
        self._draft.append(seconds)

    def record_round(self, drafted: bool, rows: int, tokens: float, seconds: float) -> None:
        """Counts a round: whether the drafter ran, the rows verified, the tokens emitted (per sequence), its time."""
        if len(self._verify.get(rows, ())) < _SAMPLES_WANTED:
            return  # kernels were being prepared
        (self._drafted if drafted else self._undrafted).record(tokens, seconds)
        if not drafted:
            return
        if self.drafting_pays:
            self._trial, self._failures = 0, 0
        else:
            self._trial += 1
            if self._trial == _TRIAL:
                self._trial, self._failures = 0, self._failures + 1
                self._drafted.fade()  # the next trial meets other text

    @property
    def drafting_pays(self) -> bool:
        """Whether rounds with drafting have lately given as much text per second as rounds without do."""
        if self._drafted.rounds < 3 or not self._verify:
            return True
        other = self._undrafted
        tokens, seconds = (other.tokens, other.seconds) if other.rounds >= 3 else (1.0, self.verify_seconds(1))
        return self._drafted.tokens * seconds >= self._drafted.seconds * tokens

    @property
    def pause(self) -> int:
        """Rounds to leave drafting off for: none while it pays or is tried, and longer after each trial that failed."""
        return min(4**self._failures, _LONGEST_PAUSE) if self._failures and not self._trial else 0

    @property
    def draft_seconds(self) -> float:
        return statistics.median_low(self._draft) if self._draft else 0.0

    def verify_seconds(self, rows: int) -> float:
        """Expected time of a forward over `rows` rows: on the line through the measured counts around, never falling.

        A count is believed from its second sample on: the first pays for kernels being prepared.
        """
        known = {count: times for count, times in self._verify.items() if len(times) >= _SAMPLES_WANTED}
        points = [(count, statistics.median_low(times)) for count, times in sorted((known or self._verify).items())]
        if not points:
            return 1.0 + _PRIOR_SLOPE * (rows - 1)
        highest = 0.0
        for i, (count, seconds) in enumerate(points):
            points[i] = (count, highest := max(highest, seconds))
        if len(points) == 1 or rows <= points[0][0]:
            slope = _PRIOR_SLOPE * points[0][1]
            return points[0][1] + slope * (rows - points[0][0])
        above = next((i for i, (count, _) in enumerate(points) if count >= rows), len(points) - 1)
        (low, low_time), (high, high_time) = points[above - 1 : above + 1]
        return low_time + (high_time - low_time) / (high - low) * (rows - low)

    def unmeasured(self, most_rows: int) -> int | None:
        """A number of rows up to `most_rows` to be tried before others can be judged: one, and some."""
        for rows in self._explored:
            if rows <= most_rows and len(self._verify.get(rows, ())) < _SAMPLES_WANTED:
                return rows
        return None

    def worthwhile(self, probabilities: Sequence[float], drafted: bool = True) -> int:
        """How many draft tokens to verify for the most text per second.

        Args:
            probabilities: of each draft token to become text, the most probable first.
            drafted: whether the drafter has run for them; its time is spent whatever is verified.
        """
        if (rows := self.unmeasured(len(probabilities) + 1)) is not None:
            return rows - 1
        spent = self.draft_seconds if drafted else 0.0
        best, best_rate, expected = 0, 0.0, 1.0
        for count, probability in enumerate([0.0, *probabilities]):
            expected += probability
            rate = expected / (spent + self.verify_seconds(count + 1))
            if rate > best_rate:
                best, best_rate = count, rate
        return best


_costs: "weakref.WeakKeyDictionary[PreTrainedModel, weakref.WeakKeyDictionary]" = weakref.WeakKeyDictionary()


def round_costs(target: PreTrainedModel, drafter: "DominoDraftModel", batch_size: int = 1) -> RoundCosts:
    """The costs measured so far for a pair where it is now, at a batch size."""
    of_pair = _costs.setdefault(target, weakref.WeakKeyDictionary()).setdefault(drafter, {})
    config = drafter.config
    shape = (config.max_tree_nodes, config.max_tree_width, config.draft_sources)
    key = (str(target.device), target.dtype, batch_size, *shape)
    return of_pair.setdefault(key, RoundCosts(config.max_tree_nodes + 1))
