"""Records -> a Markdown report and its plots. Every number in it is read from a record."""

from pathlib import Path
from typing import Any

from . import plots

Record = dict[str, Any]


def write_report(records: dict[str, Record], folder: str | Path) -> Path:
    """Writes `report.md` and PNG files.

    Args:
        records: by a short name: of benchmarks, or of studies (they have "study").
        folder: is made if need be.

    Returns:
        The path of `report.md`.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    parts = ["# Measurements", ""]
    for name, record in records.items():
        parts += _study(name, record, folder) if "study" in record else _benchmark(name, record, folder)
    path = folder / "report.md"
    path.write_text("\n".join(parts).rstrip() + "\n", encoding="utf-8")
    return path


def summary_table(record: Record) -> str:
    """The methods of a benchmark over all its prompts, as a Markdown table."""
    return _table(
        ["method", "tokens/s", "speed-up (95 %)", "tokens per forward", "identical", "draft", "verify", "rest"],
        [[name, *_overall_cells(result["overall"])] for name, result in measured(record).items()],
    )


def sets_table(record: Record) -> str:
    """Speed-up and tokens per target forward by set and method, as a Markdown table."""
    results = measured(record)
    sets = list(next(iter(results.values()))["sets"])
    return _table(
        ["method", *sets],
        [
            [
                name,
                *(
                    f"{result['sets'][label]['speedup']:.2f}× / {result['sets'][label]['acceptance_length']:.2f}"
                    for label in sets
                ),
            ]
            for name, result in results.items()
        ],
    )


def measured(record: Record) -> dict[str, Any]:
    """The methods that could be measured."""
    return {name: result for name, result in record["methods"].items() if "unavailable" not in result}


def _overall_cells(figures: dict[str, Any]) -> list[str]:
    low, high = figures["speedup_ci95"]
    parts = [figures["draft_seconds"], figures["verify_seconds"], figures["other_seconds"]]
    return [
        f"{figures['tokens_per_second']:.1f}",
        f"{figures['speedup']:.2f}× ({low:.2f}–{high:.2f})",
        f"{figures['acceptance_length']:.2f}",
        f"{figures['identical']:.1%}",
        *("–" if part is None else f"{part / figures['seconds']:.0%}" for part in parts),
    ]


def _benchmark(name: str, record: Record, folder: Path) -> list[str]:
    settings = record["settings"]
    how = f"temperature {settings['temperature']}" if settings["temperature"] else "greedy"
    counts = {label: len(hashes) for label, hashes in record["prompts"].items()}
    parts = [
        f"## {name}",
        "",
        f"{sum(counts.values())} prompts ({', '.join(f'{label} {count}' for label, count in counts.items())}), {how}, "
        f"at most {settings['max_new_tokens']} new tokens, batch size {settings['batch_size']}. "
        f"{_environment(record['environment'])}",
        "",
        summary_table(record),
        "",
        "Medians over prompts with 95 % bootstrap intervals over prompts; methods interleaved per prompt, first call "
        "left out. Tokens per forward are those per target forward after the prefill, the bonus included. Draft, "
        "verify and rest are shares of the whole time.",
        "",
        "Speed-up / tokens per forward, by set:",
        "",
        sets_table(record),
        "",
    ]
    for method, result in record["methods"].items():
        if "unavailable" in result:
            parts.append(f"- `{method}` was not measured: {result['unavailable']}.")
        elif result.get("note"):
            parts.append(f"- `{method}`: {result['note']}.")
    parts += ["", *_differences(record), *_quality(record), *_round_cost(record)]
    results = measured(record)
    for plot, title, draw in (
        ("speedup", "Speed-up by set", plots.speedup_by_set),
        ("acceptance", "Acceptance per draft position", plots.acceptance_by_position),
        ("time", "Time per target forward", plots.time_per_round),
    ):
        file = f"{_slug(name)}-{plot}.png"
        if draw(results, folder / file):
            parts += [f"![{title}]({file})", ""]
    return parts


def _environment(environment: dict[str, Any]) -> str:
    return (
        f"{environment['processor']}, {environment['threads']} threads, device {environment['device']}, "
        f"{environment['dtype']}, torch {environment['torch']}, transformers {environment['transformers']}, "
        f"hf_domino {environment['hf_domino']}, {environment['date'][:10]}."
    )


def _differences(record: Record) -> list[str]:
    rows = [
        [
            method,
            difference["unit"].partition(":")[0],
            str(difference["position"]),
            f"{difference['margin']:.3f}",
            "yes" if difference["top2"] else "no",
        ]
        for method, result in measured(record).items()
        for difference in result.get("differences", [])
    ]
    if not rows:
        return []
    table = _table(["method", "prompt", "at token", "target's top-2 margin", "both of its top 2"], rows)
    return ["First differences from plain decoding, and the target's own margin there:", "", table, ""]


def _quality(record: Record) -> list[str]:
    results = {name: result["overall"].get("quality") for name, result in measured(record).items()}
    kinds = sorted({kind for quality in results.values() for kind in quality or {}})
    if not kinds:
        return []
    rows = [
        [name, *(f"{quality[kind]:.1%}" if kind in quality else "–" for kind in kinds)]
        for name, quality in results.items()
        if quality
    ]
    return ["Task quality:", "", _table(["method", *(kind.replace("_", " ") for kind in kinds)], rows), ""]


def _round_cost(record: Record) -> list[str]:
    costs = {name: cost for name, cost in (record.get("cost_of_a_draft_round") or {}).items() if cost}
    if not costs:
        return []
    rows = [
        [name, *(str(cost[key]) for key in ("dispatches", "launches", "synchronisations"))]
        for name, cost in costs.items()
    ]
    table = _table(["draft round", "operator dispatches", "without views", "host synchronisations"], rows)
    return ["Cost of one draft round on any machine:", "", table, ""]


def _study(name: str, record: Record, folder: Path) -> list[str]:
    file = f"{_slug(name)}.png"
    plots.study_curves(record, folder / file)
    rows = [
        [
            str(point["x"]),
            method,
            f"{figures['speedup']:.2f}×",
            f"{figures['acceptance_length']:.2f}",
            _milliseconds(figures, "draft_seconds"),
            f"{figures['identical']:.1%}",
        ]
        for point in record["points"]
        for method, figures in point["methods"].items()
    ]
    headers = [record["x_label"], "method", "speed-up", "tokens per forward", "draft ms per forward", "identical"]
    return [
        f"## {name}",
        "",
        record["question"],
        "",
        _environment(record["environment"]),
        "",
        _table(headers, rows),
        "",
        f"![{record['study']}]({file})",
        "",
    ]


def _milliseconds(figures: dict[str, Any], part: str) -> str:
    return f"{1000 * figures[part] / figures['rounds']:.1f}" if figures[part] is not None and figures["rounds"] else "–"


def _slug(name: str) -> str:
    return "".join(c if c.isalnum() else "-" for c in name.lower())


def _table(headers: list[str], rows: list[list[str]]) -> str:
    lines = [headers, ["---"] * len(headers), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)
