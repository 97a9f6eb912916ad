"""The pictures of the report. One function a picture; each says whether there was something to draw."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt  # noqa: E402 - the backend is chosen first

_OURS = ("domino",)
_PARTS = {"draft_seconds": "draft", "verify_seconds": "verify", "other_seconds": "rest"}


@contextmanager
def _figure(path: Path, width: float = 8.0, columns: int = 1) -> Iterator[Any]:
    figure, axes = plt.subplots(1, columns, figsize=(width, 4.0), squeeze=False)
    for axis in axes[0]:
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(axis="y", alpha=0.3)
        axis.set_axisbelow(True)
    try:
        yield axes[0] if columns > 1 else axes[0][0]
        figure.tight_layout()
        figure.savefig(path, dpi=150)
    finally:
        plt.close(figure)


def speedup_by_set(results: dict[str, Any], path: Path) -> bool:
    """Bars of the speed-up with intervals: a group for all prompts and one for each set."""
    methods = [name for name in results if name != "plain"]
    if not methods:
        return False
    sets = list(results[methods[0]]["sets"])
    groups = ["all", *sets] if len(sets) > 1 else sets
    with _figure(path, max(8.0, 0.35 * len(groups) * len(methods))) as axis:
        step = 0.85 / len(methods)
        for i, name in enumerate(methods):
            figures = [results[name]["overall"] if g == "all" else results[name]["sets"][g] for g in groups]
            heights = [f["speedup"] for f in figures]
            below = [max(0.0, f["speedup"] - f["speedup_ci95"][0]) for f in figures]
            above = [max(0.0, f["speedup_ci95"][1] - f["speedup"]) for f in figures]
            axis.bar(
                [g + i * step for g in range(len(groups))],
                heights,
                step,
                yerr=[below, above],
                capsize=2,
                label=name,
                edgecolor="black" if name in _OURS else "none",
            )
        axis.axhline(1.0, color="black", linewidth=0.8)
        axis.set_xticks([g + step * (len(methods) - 1) / 2 for g in range(len(groups))], groups, rotation=20)
        axis.set_ylabel("speed-up over plain generate")
        axis.legend(fontsize=8, ncols=min(4, len(methods)))
    return True


def acceptance_by_position(results: dict[str, Any], path: Path) -> bool:
    """Share of rounds that accept at least so many drafts, and the chance of each draft given those before it."""
    curves = {name: result["overall"]["acceptance_per_position"] for name, result in results.items()}
    curves = {name: curve for name, curve in curves.items() if curve["reached"]}
    if not curves:
        return False
    with _figure(path, 10.0, columns=2) as (left, right):
        for name, curve in curves.items():
            positions = range(1, len(curve["reached"]) + 1)
            left.plot(positions, curve["reached"], marker="o", markersize=3, label=name)
            right.plot(positions, curve["conditional"], marker="o", markersize=3, label=name)
        left.set_ylabel("share of rounds accepting at least k drafts")
        right.set_ylabel("chance of draft k, given the k - 1 before")
        for axis in (left, right):
            axis.set_xlabel("draft position k (in a tree: depth)")
            axis.set_ylim(0, 1)
        right.legend(fontsize=8)
    return True


def time_per_round(results: dict[str, Any], path: Path) -> bool:
    """Stacked bars: milliseconds of drafting, verifying and the rest, per target forward after the prefill."""
    timed = {
        n: r["overall"]
        for n, r in results.items()
        if r["overall"]["rounds"] and r["overall"]["draft_seconds"] is not None
    }
    if not timed:
        return False
    with _figure(path) as axis:
        bottom = [0.0] * len(timed)
        for part, label in _PARTS.items():
            heights = [1000 * figures[part] / figures["rounds"] for figures in timed.values()]
            axis.bar(list(timed), heights, 0.6, bottom=bottom, label=label)
            bottom = [low + height for low, height in zip(bottom, heights)]
        axis.set_ylabel("milliseconds per target forward")
        axis.tick_params(axis="x", rotation=20)
        axis.legend(fontsize=8)
    return True


def study_curves(record: dict[str, Any], path: Path) -> bool:
    """Speed-up and tokens per forward over the study's variable, a curve for each method."""
    points = record["points"]
    methods = list(dict.fromkeys(name for point in points for name in point["methods"]))
    numeric = all(isinstance(point["x"], int | float) for point in points)
    with _figure(path, 10.0, columns=2) as (left, right):
        for name in methods:
            own = [point for point in points if name in point["methods"]]
            xs = [point["x"] if numeric else str(point["x"]) for point in own]
            figures = [point["methods"][name] for point in own]
            heights = [f["speedup"] for f in figures]
            below = [max(0.0, f["speedup"] - f["speedup_ci95"][0]) for f in figures]
            above = [max(0.0, f["speedup_ci95"][1] - f["speedup"]) for f in figures]
            style = "-" if numeric else ""
            left.errorbar(xs, heights, yerr=[below, above], marker="o", linestyle=style, capsize=2, label=name)
            right.plot(xs, [f["acceptance_length"] for f in figures], marker="o", linestyle=style, label=name)
        left.set_ylabel("speed-up over plain generate")
        right.set_ylabel("tokens per target forward")
        for axis in (left, right):
            axis.set_xlabel(record["x_label"])
            if numeric and record.get("log_x"):
                axis.set_xscale("log", base=2)
        right.legend(fontsize=8)
    return True
