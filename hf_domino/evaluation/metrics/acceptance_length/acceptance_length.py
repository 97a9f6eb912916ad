"""Acceptance length of speculative decoding: mean tokens per target forward."""

from collections.abc import Iterable

import datasets
import evaluate

_DESCRIPTION = """
Acceptance length (tau): mean tokens that one forward of the target yields, the target's own token (the "bonus")
included and the forward over the prompt left out. 1.0 means that no draft was ever accepted. Some papers leave the
bonus out; their number is this one less 1.
"""
_INPUTS = """
Args:
    predictions: for each generated text, a list with the number of draft tokens accepted in each round.
Returns:
    acceptance_length: tokens per target forward, over all rounds of all texts.
    rounds: number of target forwards counted.
"""


def acceptance_length(accepted_per_text: Iterable[Iterable[int]]) -> float:
    """Tokens per target forward; 1.0 where there was none."""
    rounds = [accepted for text in accepted_per_text for accepted in text]
    return 1.0 + sum(rounds) / len(rounds) if rounds else 1.0


class AcceptanceLength(evaluate.Metric):
    """See the description."""

    def _info(self) -> evaluate.MetricInfo:
        return evaluate.MetricInfo(
            description=_DESCRIPTION,
            citation="",
            inputs_description=_INPUTS,
            features=datasets.Features({"predictions": datasets.Sequence(datasets.Value("int64"))}),
        )

    def _compute(self, predictions: list[list[int]]) -> dict[str, float]:
        return {"acceptance_length": acceptance_length(predictions), "rounds": sum(map(len, predictions))}
