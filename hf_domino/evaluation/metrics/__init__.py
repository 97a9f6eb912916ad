"""Metrics as `evaluate.Metric` modules. Each folder is complete by itself: it can be pushed as a Space as it is.

Offline: `evaluate.load(str(metric_folder("acceptance_length")))`, or import the class.
"""

from pathlib import Path

NAMES = (
    "acceptance_length",
    "acceptance_per_position",
    "decoding_speedup",
    "output_agreement",
    "gsm8k_exact_match",
    "code_pass_rate",
)


def metric_folder(name: str) -> Path:
    """The folder of a metric, for `evaluate.load` or for publishing.

    Raises:
        ValueError: there is no metric of this name.
    """
    if name not in NAMES:
        raise ValueError(f"There is no metric {name!r}; there are {', '.join(NAMES)}.")
    return Path(__file__).parent / name
