"""Exact match on GSM8K's final answers."""

import re
from decimal import Decimal, InvalidOperation

import datasets
import evaluate

_DESCRIPTION = """
Share of answers to grade-school maths problems (GSM8K) whose final number is the reference's. The final number is the
one after "####", else the one in the last \\boxed{}, else the last number of the text; signs, thousands separators,
currency and trailing zeros do not matter.
"""
_INPUTS = """
Args:
    predictions: the model's answers.
    references: GSM8K's `answer` texts, or the bare numbers.
Returns:
    exact_match: share that is right.
"""
_NUMBER = re.compile(r"-?\$?\d[\d,]*(?:\.\d+)?|-?\$?\.\d+")


def final_number(text: str) -> Decimal | None:
    """The number that an answer ends in, or `None`."""
    if "####" in text:
        found = _NUMBER.findall(text.rsplit("####", 1)[1])[:1]
    else:
        boxed = re.findall(r"\\boxed\{([^{}]*)\}", text)
        found = _NUMBER.findall(boxed[-1])[-1:] if boxed else _NUMBER.findall(text)[-1:]
    try:
        return Decimal(found[0].replace(",", "").replace("$", "")) if found else None
    except InvalidOperation:
        return None


def gsm8k_exact_match(predictions: list[str], references: list[str]) -> float:
    """Share of answers that end in their reference's number.

    Raises:
        ValueError: a reference without a number.
    """
    expected = [final_number(reference) for reference in references]
    if None in expected:
        raise ValueError(f"This reference holds no number: {references[expected.index(None)]!r}.")
    hits = [final_number(text) == number for text, number in zip(predictions, expected, strict=True)]
    return sum(hits) / len(hits)


class Gsm8kExactMatch(evaluate.Metric):
    """See the description."""

    def _info(self) -> evaluate.MetricInfo:
        return evaluate.MetricInfo(
            description=_DESCRIPTION,
            citation="",
            inputs_description=_INPUTS,
            features=datasets.Features(
                {"predictions": datasets.Value("string"), "references": datasets.Value("string")}
            ),
        )

    def _compute(self, predictions: list[str], references: list[str]) -> dict[str, float]:
        return {"exact_match": gsm8k_exact_match(predictions, references)}
