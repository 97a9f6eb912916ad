"""What a round costs on this machine, as measured, and how many draft tokens are therefore worth verifying."""

import statistics
import weakref
from collections import deque
from collections.abc import Sequence

from transformers import PreTrainedModel

_SAMPLES_KEPT = 7
_SAMPLES_WANTED = 2  # the first of a shape pays for kernels being prepared
_PRIOR_SLOPE = 0.03  # of the time of one row, per further row, until something is measured


class RoundCosts:
    """Times of verifying forwards by their number of rows, and of drafting.

    The times belong to a target on a machine, not to a call: they outlive the call, so that only the first one has to
    explore. They decide how much is drafted and never what is emitted.
    """

    def __init__(self) -> None:
        self._verify: dict[int, deque[float]] = {}
        self._draft: deque[float] = deque(maxlen=_SAMPLES_KEPT)

    def record_verify(self, rows: int, seconds: float) -> None:
        self._verify.setdefault(rows, deque(maxlen=_SAMPLES_KEPT)).append(seconds)

    def record_draft(self, seconds: float) -> None:
        self._draft.append(seconds)

    @property
    def draft_seconds(self) -> float:
        return statistics.median_low(self._draft) if self._draft else 0.0

    def verify_seconds(self, rows: int) -> float:
        """Expected time of a forward over `rows` rows: between measured counts by interpolation, never falling."""
        points = [(count, statistics.median_low(times)) for count, times in sorted(self._verify.items())]
        if not points:
            return 1.0 + _PRIOR_SLOPE * (rows - 1)
        highest = 0.0
        for i, (count, seconds) in enumerate(points):
            points[i] = (count, highest := max(highest, seconds))
        if len(points) == 1 or rows <= points[0][0]:
            slope = _PRIOR_SLOPE * points[0][1]
            return points[0][1] + slope * (rows - points[0][0])
        for (low, low_time), (high, high_time) in zip(points, points[1:]):
            if rows <= high:
                break
        return low_time + (high_time - low_time) / (high - low) * (rows - low)

    def unmeasured(self, most_rows: int) -> int | None:
        """A number of rows that has to be tried before the others can be judged: first one, then some, then most."""
        for rows in sorted({1, max(2, most_rows // 4), most_rows}):
            if len(self._verify.get(rows, ())) < _SAMPLES_WANTED:
                return rows
        return None

    def worthwhile(self, probabilities: Sequence[float]) -> int:
        """How many draft tokens to verify for the most text per second.

        Args:
            probabilities: of each draft token to become text, the most probable first.
        """
        if (rows := self.unmeasured(len(probabilities) + 1)) is not None:
            return rows - 1
        best, best_rate, expected = 0, 0.0, 1.0
        for count, probability in enumerate([0.0, *probabilities]):
            expected += probability
            rate = expected / (self.draft_seconds + self.verify_seconds(count + 1))
            if rate > best_rate:
                best, best_rate = count, rate
        return best


_costs: "weakref.WeakKeyDictionary[PreTrainedModel, dict]" = weakref.WeakKeyDictionary()


def round_costs(target: PreTrainedModel, batch_size: int = 1) -> RoundCosts:
    """The costs measured so far for a target where it is now, at a batch size."""
    key = (str(target.device), target.dtype, batch_size)
    return _costs.setdefault(target, {}).setdefault(key, RoundCosts())
