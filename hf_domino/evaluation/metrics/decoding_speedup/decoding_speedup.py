"""Speed-up of one way of generating over another, prompt by prompt, with a bootstrap interval."""

from collections.abc import Callable, Sequence

import datasets
import evaluate
import numpy as np

_DESCRIPTION = """
Median over prompts of the ratio of tokens per second, method over baseline, with a 95 % bootstrap interval over the
prompts. Each pair of values must come from the same prompt and machine, best measured one right after the other.
"""
_INPUTS = """
Args:
    predictions: tokens per second of the method, one value per prompt.
    references: tokens per second of the baseline on the same prompts.
Returns:
    speedup: median ratio. speedup_ci95: [low, high].
"""
_RESAMPLES = 2000


def bootstrap_interval(
    values: Sequence[float], statistic: Callable[..., np.ndarray] = np.median, resamples: int = _RESAMPLES
) -> list[float]:
    """95 % percentile interval of a statistic over resampled values; the same values give the same interval."""
    data = np.asarray(values, dtype=float)
    picks = np.random.default_rng(0).integers(0, len(data), size=(resamples, len(data)))
    low, high = np.percentile(statistic(data[picks], axis=1), [2.5, 97.5])
    return [float(low), float(high)]


def decoding_speedup(method: Sequence[float], baseline: Sequence[float]) -> dict[str, float | list[float]]:
    """Median ratio of rates, and its interval.

    Raises:
        ValueError: the lists differ in length, are empty, or hold a rate that is not positive.
    """
    if len(method) != len(baseline) or not len(method):
        raise ValueError(f"Expected as many rates of both, one per prompt, got {len(method)} and {len(baseline)}.")
    if not all(0 < rate < np.inf for rate in [*method, *baseline]):
        raise ValueError("Rates must be positive.")
    ratios = np.asarray(method, dtype=float) / np.asarray(baseline, dtype=float)
    return {"speedup": float(np.median(ratios)), "speedup_ci95": bootstrap_interval(ratios)}


class DecodingSpeedup(evaluate.Metric):
    """See the description."""

    def _info(self) -> evaluate.MetricInfo:
        return evaluate.MetricInfo(
            description=_DESCRIPTION,
            citation="",
            inputs_description=_INPUTS,
            features=datasets.Features(
                {"predictions": datasets.Value("float64"), "references": datasets.Value("float64")}
            ),
        )

    def _compute(self, predictions: list[float], references: list[float]) -> dict[str, float | list[float]]:
        return decoding_speedup(predictions, references)
