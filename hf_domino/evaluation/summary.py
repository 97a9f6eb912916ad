"""Rows of single calls -> what the record says of a method: medians and intervals over prompts, sums over rounds."""

from collections.abc import Iterable
from typing import Any

import numpy as np

from .metrics.acceptance_length.acceptance_length import acceptance_length
from .metrics.acceptance_per_position.acceptance_per_position import acceptance_per_position
from .metrics.decoding_speedup.decoding_speedup import bootstrap_interval, decoding_speedup
from .metrics.gsm8k_exact_match.gsm8k_exact_match import gsm8k_exact_match
from .metrics.output_agreement.output_agreement import share_of_near_ties

Row = dict[str, Any]


def summarise(rows: list[Row], greedy: bool) -> dict[str, dict[str, Any]]:
    """Per method: `overall`, `sets`, and the texts that differ from plain's.

    Args:
        rows: as `benchmark.run` makes them, of all methods and prompts; `plain` among them.
        greedy: whether differences can be judged by the target's margin.
    """
    baseline = _rates(row for row in rows if row["method"] == "plain")
    methods: dict[str, dict[str, Any]] = {}
    for name in dict.fromkeys(row["method"] for row in rows):
        own = [row for row in rows if row["method"] == name]
        sets = dict.fromkeys(row["set"] for row in own)
        methods[name] = {
            "overall": _figures(own, baseline),
            "sets": {label: _figures([row for row in own if row["set"] == label], baseline) for label in sets},
        }
        if greedy and name != "plain":
            ties = [row["difference"] | {"unit": row["unit"]} for row in own if row["difference"] is not None]
            methods[name]["differences"] = ties
            methods[name]["near_ties"] = share_of_near_ties([tie["margin"] for tie in ties])
    return methods


def _rates(rows: Iterable[Row]) -> dict[str, float]:
    """Tokens per second of each unit (a prompt with all its turns, or a batch of prompts)."""
    tokens: dict[str, int] = {}
    seconds: dict[str, float] = {}
    for row in rows:
        tokens[row["unit"]] = tokens.get(row["unit"], 0) + row["tokens"]
        seconds[row["unit"]] = seconds.get(row["unit"], 0.0) + row["seconds"]
    return {unit: tokens[unit] / seconds[unit] for unit in tokens}


def _figures(rows: list[Row], baseline: dict[str, float]) -> dict[str, Any]:
    rates = _rates(rows)
    units = list(rates)
    accepted = [row["accepted"] for row in rows]
    total = sum(row["seconds"] for row in rows)
    parts = {
        part: sum(row[part] for row in rows) if all(row[part] is not None for row in rows) else None
        for part in ("draft_seconds", "verify_seconds")
    }
    figures: dict[str, Any] = {
        "prompts": len(units),
        "tokens": sum(row["tokens"] for row in rows),
        "seconds": total,
        "rounds": sum(map(len, accepted)),
        "tokens_per_second": float(np.median(list(rates.values()))),
        "tokens_per_second_ci95": bootstrap_interval(list(rates.values())),
        **decoding_speedup(list(rates.values()), [baseline[unit] for unit in units]),
        "acceptance_length": acceptance_length(accepted),
        "acceptance_per_position": acceptance_per_position(accepted),
        "drafted_per_round": _mean([count for row in rows for count in row["drafted"]]),
        "identical": _mean([flag for row in rows for flag in row["identical"]]),
        **parts,
        "other_seconds": total - sum(value or 0.0 for value in parts.values()),
    }
    if quality := _quality(rows):
        figures["quality"] = quality
    return figures


def _quality(rows: list[Row]) -> dict[str, float | None]:
    quality: dict[str, float | None] = {}
    maths = [row for row in rows if row.get("answer") is not None]
    if maths:
        quality["exact_match"] = gsm8k_exact_match([row["text"] for row in maths], [row["answer"] for row in maths])
    programs = [row["passed"] for row in rows if row.get("passed") is not None]
    if programs:
        quality["pass_rate"] = _mean(programs)
    return quality


def _mean(values: list) -> float | None:
    return float(np.mean(values)) if values else None
