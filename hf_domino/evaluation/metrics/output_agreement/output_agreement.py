"""Share of texts that are the same token by token, and whether the others part at near-ties."""

from collections.abc import Sequence

import datasets
import evaluate

_DESCRIPTION = """
Share of outputs identical to the reference's, token by token. Lossless decoding gives 1.0 in float32. In bfloat16 a
forward over one token and one over several round differently, so two ways of decoding the same model part where the
target's two best logits are nearly equal: for each text that differs, give the target's margin there (best logit less
the second) and the share that parted within `tie_margin` is reported too.
"""
_INPUTS = """
Args:
    predictions: token ids of each text.
    references: token ids of each text, decoded plainly.
    margins: the target's top-2 logit margin at the first difference of each text (any number where there is none).
    tie_margin: what counts as a near-tie (default 0.25, two steps of bfloat16 for logits from 16 to 32).
Returns:
    identical: share of identical texts.
    near_ties: of the texts that differ, the share that parted within `tie_margin` (null if none differs).
    first_differences: index of the first difference of each text, -1 where there is none.
"""
TIE_MARGIN = 0.25


def first_difference(ours: Sequence[int], reference: Sequence[int]) -> int | None:
    """Index of the first token that differs, or where the shorter text ends; `None` if they are the same."""
    for i, (a, b) in enumerate(zip(ours, reference)):
        if a != b:
            return i
    return None if len(ours) == len(reference) else min(len(ours), len(reference))


def share_of_near_ties(margins: Sequence[float], tie_margin: float = TIE_MARGIN) -> float | None:
    """Share of margins within `tie_margin`; `None` for no margins."""
    return sum(margin <= tie_margin for margin in margins) / len(margins) if margins else None


class OutputAgreement(evaluate.Metric):
    """See the description."""

    def _info(self) -> evaluate.MetricInfo:
        return evaluate.MetricInfo(
            description=_DESCRIPTION,
            citation="",
            inputs_description=_INPUTS,
            features=datasets.Features(
                {
                    "predictions": datasets.Sequence(datasets.Value("int64")),
                    "references": datasets.Sequence(datasets.Value("int64")),
                }
            ),
        )

    def _compute(self, predictions, references, margins=None, tie_margin: float = TIE_MARGIN) -> dict:
        found = [first_difference(ours, theirs) for ours, theirs in zip(predictions, references, strict=True)]
        parted = [] if margins is None else [m for m, at in zip(margins, found, strict=True) if at is not None]
        return {
            "identical": sum(at is None for at in found) / len(found),
            "near_ties": share_of_near_ties(parted, tie_margin),
            "first_differences": [-1 if at is None else at for at in found],
        }
