"""How often the first, second, third... draft of a round becomes text."""

from collections.abc import Iterable

import datasets
import evaluate

_DESCRIPTION = """
Acceptance per draft position. `reached[k]` is the share of all rounds in which at least k + 1 draft tokens were
accepted; the sum over k is the acceptance length less 1. `conditional[k]` is that share among the rounds in which the
k drafts before were accepted: the chance that the draft at k is right, given that it counted. In a tree of drafts the
position is the depth.
"""
_INPUTS = """
Args:
    predictions: for each generated text, a list with the number of draft tokens accepted in each round.
Returns:
    reached, conditional: lists over the draft position, as long as the longest acceptance.
"""


def acceptance_per_position(accepted_per_text: Iterable[Iterable[int]]) -> dict[str, list[float]]:
    """Shares by draft position: `reached`, of all rounds, and `conditional`, of the rounds that came so far."""
    rounds = [accepted for text in accepted_per_text for accepted in text]
    survivors = [sum(accepted > k for accepted in rounds) for k in range(max(rounds, default=0))]
    before = [len(rounds), *survivors]
    return {
        "reached": [count / len(rounds) for count in survivors],
        "conditional": [count / previous for count, previous in zip(survivors, before)],
    }


class AcceptancePerPosition(evaluate.Metric):
    """See the description."""

    def _info(self) -> evaluate.MetricInfo:
        return evaluate.MetricInfo(
            description=_DESCRIPTION,
            citation="",
            inputs_description=_INPUTS,
            features=datasets.Features({"predictions": datasets.Sequence(datasets.Value("int64"))}),
        )

    def _compute(self, predictions: list[list[int]]) -> dict[str, list[float]]:
        return acceptance_per_position(predictions)
