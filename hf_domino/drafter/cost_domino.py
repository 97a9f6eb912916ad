"""What a round costs on this machine, as measured, and how many draft tokens are therefore worth verifying."""

import math
import statistics
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from transformers import PreTrainedModel

if TYPE_CHECKING:
    from .modeling_domino import DominoDraftModel

_SAMPLES_KEPT = 7
_SAMPLES_WANTED = 2  # of a number of rows before it is believed: the first pays for kernels being prepared
_PRIOR_SLOPE = 0.03  # of the time of one row, per further row, until something is measured
# Of the slope from one row to the mean of several against the slope among these: what a sample two rows off weighs.
_PRIOR_WEIGHT = 4.0
_TRIAL = 4  # rounds with drafting that do not pay before it is paused: accepted lengths vary
_MOST_FAILURES = 3  # that are counted: the longest pause is of 4**3 rounds
_FADED = 0.3
_SURE_GAIN = 1.5  # of a round over the text's own tokens on plain decoding, from which on the drafter need not be asked
_MEMORY = 0.9  # how much of the evidence on drafting a round keeps of the rounds before
_CALIBRATION_MEMORY = 0.98
_SHORT_CONTEXT = 512  # tokens; up to this, and for each doubling from it on, costs are measured apart
_SHARE_BY_TILE = 0.5  # of what rows cost, where a kernel takes several at once (measured: docs/log.md)
_LEAST_CALIBRATION = 0.02  # never nothing, or a drafter that became useful would not be found out


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


@dataclass
class _Line:
    """Time of a forward by its rows as they are paid for. One row stands apart: it runs other kernels than several do.

    one: its time, if it was measured. least: the shortest time measured; none is below.
    """

    one: float | None
    least: float
    intercept: float
    slope: float

    def seconds(self, priced_rows: float) -> float:
        return max(self.one or self.least, self.intercept + self.slope * priced_rows)


class RoundCosts:
    """Times of verifying forwards by their number of rows, and what rounds with and without drafting have brought.

    They belong to a target and a drafter on a machine, not to a call: they outlive it, so that only the first call
    has to explore. They decide how much is drafted and never what is emitted.

    Single times scatter by a third on busy machines, so nothing is judged by them: a round costs the median time of
    drafting, and what the line through the median times of verifying says for its rows.

    Args:
        max_rows: the most rows that a sequence may have in one forward.
        tile: how many rows of a sequence the target's products take at once. They cost by the row in part only, so
            the last row of a tile is cheap and the first dear.
    """

    def __init__(self, max_rows: int, tile: float = 1) -> None:
        self._tile = tile
        # More rows are tried when those measured say that they would pay.
        self._explored = sorted({1, max(2, max_rows // 4)})
        # Threads may share a pair: samples are replaced, never changed, while another reads them.
        self._verify: dict[int, tuple[float, ...]] = {}
        self._line: _Line | None = None
        self._draft: tuple[float, ...] = ()
        self._drafted, self._undrafted = _Rate(), _Rate()
        self._trial, self._failures = 0, 0
        self._expected, self._accepted = 8.0, 8.0

    def record_verify(self, rows: int, seconds: float) -> None:
        seconds = max(seconds, 1e-9)  # clocks have a grain, and rates divide by this
        self._verify[rows] = (*self._verify.get(rows, ()), seconds)[-_SAMPLES_KEPT:]
        self._line = None

    def record_draft(self, seconds: float) -> None:
        self._draft = (*self._draft, seconds)[-_SAMPLES_KEPT:]

    def record_acceptance(self, expected: float, accepted: float) -> None:
        """Counts the drafter's nodes verified in a round: the sum of its own probabilities, and how many were right."""
        self._expected = _CALIBRATION_MEMORY * self._expected + expected
        self._accepted = _CALIBRATION_MEMORY * self._accepted + accepted

    @property
    def calibration(self) -> float:
        """What the drafter's own probabilities are multiplied by: drafts accepted over those expected, at most 1."""
        return max(_LEAST_CALIBRATION, min(1.0, self._accepted / self._expected))

    def record_round(self, drafted: bool, rows: int, tokens: float) -> None:
        """Counts a round: whether the drafter ran, the rows verified, the tokens emitted (per sequence).

        Rounds with the drafter are compared with those without, so where the text `suffices` neither is counted.
        """
        if drafted and len(self._draft) < _SAMPLES_WANTED:
            return  # weights were being packed, kernels prepared
        spent = self.draft_seconds if drafted else 0.0
        (self._drafted if drafted else self._undrafted).record(tokens, spent + self.verify_seconds(rows))
        if not drafted:
            return
        if self.drafting_pays:
            self._trial, self._failures = 0, 0
        else:
            self._trial += 1
            if self._trial == _TRIAL:
                self._trial, self._failures = 0, min(self._failures + 1, _MOST_FAILURES)
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
        return 4**self._failures if self._failures and not self._trial else 0

    @property
    def plain_rounds_due(self) -> int:
        """Rounds of one row that are still to be timed, for all else is compared with them."""
        return max(0, _SAMPLES_WANTED - len(self._verify.get(1, ())))

    @property
    def draft_seconds(self) -> float:
        return statistics.median_low(self._draft) if self._draft else 0.0

    def verify_seconds(self, rows: int) -> float:
        """Expected time of a forward over `rows` rows; never falling with them."""
        if not self._verify:
            return 1.0 + _PRIOR_SLOPE * (self._priced(rows) - 1)
        line = self._line
        if line is None:
            self._line = line = self._fitted()
        return line.one if rows == 1 and line.one is not None else line.seconds(self._priced(rows))

    def _priced(self, rows: int) -> float:
        """Rows as they are paid for: in part by the tile."""
        return rows + _SHARE_BY_TILE * (math.ceil(rows / self._tile) * self._tile - rows)

    def _fitted(self) -> _Line:
        """Least squares over the median of each number of rows, weighted by its samples."""
        measured = dict(self._verify)
        known = {rows: times for rows, times in measured.items() if len(times) >= _SAMPLES_WANTED} or measured
        medians = {rows: statistics.median_low(times) for rows, times in known.items()}
        one = medians.pop(1, None)
        if not medians:
            assert one is not None  # something was measured
            return _Line(one, one, one * (1 - _PRIOR_SLOPE), one * _PRIOR_SLOPE)
        weights = {rows: len(known[rows]) for rows in medians}
        whole = sum(weights.values())
        priced = {rows: self._priced(rows) for rows in medians}
        mean_rows = sum(weights[rows] * priced[rows] for rows in medians) / whole
        mean_seconds = sum(weights[rows] * seconds for rows, seconds in medians.items()) / whole
        prior = _PRIOR_SLOPE * mean_seconds if one is None else (mean_seconds - one) / (mean_rows - 1)
        variance = sum(weights[rows] * (priced[rows] - mean_rows) ** 2 for rows in medians)
        covariance = sum(weights[rows] * (priced[rows] - mean_rows) * seconds for rows, seconds in medians.items())
        slope = max(0.0, (covariance + _PRIOR_WEIGHT * prior) / (variance + _PRIOR_WEIGHT))
        return _Line(one, min(medians.values()), mean_seconds - slope * mean_rows, slope)

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
        best, _ = self._best(probabilities, self.draft_seconds if drafted else 0.0)
        on_trial = drafted and (self._trial or self._failures)
        return max(best, 1) if on_trial and probabilities else best  # of nothing verified nothing would be learnt

    def suffices(self, probabilities: Sequence[float]) -> bool:
        """Whether a round over these tokens, found without the drafter, promises more than rounds with it have given.

        Args:
            probabilities: of each token to become text, the most probable first.
        """
        if self._drafted.rounds < 3 or self.unmeasured(len(probabilities) + 1) is not None:
            return False
        _, rate = self._best(probabilities, 0.0)
        # Not for every small gain, or a drafter that once failed would hardly be tried again.
        return rate > max(self._drafted.tokens / self._drafted.seconds, _SURE_GAIN / self.verify_seconds(1))

    def _best(self, probabilities: Sequence[float], spent: float) -> tuple[int, float]:
        """The number of draft tokens that gives the most text per second, and how much that is."""
        best, best_rate, expected = 0, 0.0, 1.0
        for count, probability in enumerate([0.0, *probabilities]):
            expected += probability
            rate = expected / (spent + self.verify_seconds(count + 1))
            if rate > best_rate:
                best, best_rate = count, rate
        return best, best_rate


_costs: "weakref.WeakKeyDictionary[PreTrainedModel, weakref.WeakKeyDictionary]" = weakref.WeakKeyDictionary()


def round_costs(
    target: PreTrainedModel,
    drafter: "DominoDraftModel",
    batch_size: int = 1,
    context: int = 0,
    compiled: bool = False,
    tile: int = 1,
) -> RoundCosts:
    """The costs measured so far for a pair where it is now, at a batch size.

    Args:
        context: tokens of the prompt. Forwards behind longer ones take longer, so lengths of another magnitude have
            costs of their own.
        compiled: whether the target's forward is.
        tile: how many rows the target's products take at once, whichever sequence they are of.
    """
    of_pair = _costs.setdefault(target, weakref.WeakKeyDictionary()).setdefault(drafter, {})
    config = drafter.config
    shape = (config.max_tree_nodes, config.max_tree_width, config.draft_sources)
    magnitude = (context // _SHORT_CONTEXT).bit_length()
    key = (str(target.device), target.dtype, batch_size, magnitude, compiled, tile, *shape)
    return of_pair.setdefault(key, RoundCosts(config.max_tree_nodes + 1, tile / batch_size))
