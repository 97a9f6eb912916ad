"""Benchmark records as a card shows them: rows of a table, and entries of the model-index."""

from collections.abc import Iterable, Mapping
from typing import Any

from huggingface_hub import EvalResult

from ..drafter.finding_domino import ACCEPTANCE_METRIC

_CONDITIONS = ("engine", "hardware", "dtype", "temperature", "max_new_tokens", "command")
_OURS = "domino"


def result_of_benchmark(benchmark: Mapping[str, Any]) -> dict[str, Any]:
    """A card's result from a record of scripts/benchmark.py: its figures and their conditions, without single rows.

    Raises:
        ValueError: this is no such record.
    """
    try:
        environment, settings = benchmark["environment"], benchmark["settings"]
        processor = f"{environment['processor']}, {environment['threads']} threads"
        prompts = " ".join(f"{name}.jsonl" for name in benchmark["prompts"])
        return {
            "engine": f"transformers {environment['transformers']}, torch {environment['torch']}",
            "hardware": processor if environment["device"] == "cpu" else environment["device"],
            "dtype": environment["dtype"],
            "temperature": settings["temperature"],
            "max_new_tokens": settings["max_new_tokens"],
            "command": f"python scripts/benchmark.py --prompts {prompts} --methods {' '.join(settings['methods'])} "
            f"--max-new-tokens {settings['max_new_tokens']} --temperature {settings['temperature']} "
            f"--seed {settings['seed']} --output record.json",
            "methods": {
                name: {part: figures[part] for part in ("overall", "sets") if part in figures}
                for name, figures in benchmark["methods"].items()
                if "unavailable" not in figures
            },
        }
    except KeyError as error:
        raise ValueError(f"This is no record of scripts/benchmark.py: it lacks {error}.") from error


def card_results(results: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Results as the templates take them: the conditions, and `rows` of the table.

    Args:
        results: each with `methods` as in a record of scripts/benchmark.py, and the conditions: engine, hardware,
            dtype, temperature, max_new_tokens, command.

    Raises:
        ValueError: a condition or a figure is missing.
    """
    found = []
    for result in results:
        missing = [key for key in (*_CONDITIONS, "methods") if result.get(key) is None]
        if missing:
            raise ValueError(f"A result without its {', '.join(missing)} says nothing; add it to the card's record.")
        found.append(
            {
                **{key: str(result[key]) for key in _CONDITIONS},
                "methods": result["methods"],
                "rows": list(_rows(result["methods"])),
            }
        )
    return found


def eval_results(results: Iterable[Mapping[str, Any]]) -> list[EvalResult]:
    """Entries of the model-index: acceptance length and speed-up of the drafter, per prompt set."""
    entries = []
    for result in results:
        conditions = f"{result['engine']}, {result['hardware']}, {result['dtype']}, temperature {result['temperature']}"
        for name, figures in _sets(result["methods"].get(_OURS, {})):
            for metric, title in ((ACCEPTANCE_METRIC, "Tokens per target forward"), ("speedup", "Speed-up")):
                if figures.get(metric) is not None:
                    entries.append(
                        EvalResult(
                            task_type="text-generation",
                            dataset_type=name,
                            dataset_name=name,
                            dataset_config=conditions,
                            metric_type=metric,
                            metric_name=title,
                            metric_value=round(float(figures[metric]), 3),
                        )
                    )
    return entries


def _sets(method: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any]]]:
    sets = dict(method.get("sets") or {})
    if len(sets) != 1 and method.get("overall"):
        sets["all prompts"] = method["overall"]
    return list(sets.items())


def _rows(methods: Mapping[str, Any]) -> Iterable[dict[str, str]]:
    for method, figures in methods.items():
        for name, row in _sets(figures):
            yield {
                "set": name,
                "method": method,
                "tokens_per_second": _number(row.get("tokens_per_second"), "{:.1f}"),
                "speedup": _number(row.get("speedup"), "{:.2f}x"),
                "interval": " to ".join(_number(bound, "{:.2f}") for bound in row.get("speedup_ci95") or ()) or "-",
                "tau": _number(row.get(ACCEPTANCE_METRIC), "{:.2f}"),
                "identical": _number(row.get("identical"), "{:.0%}"),
            }


def _number(value: Any, form: str) -> str:
    return "-" if value is None else form.format(value)
