"""Cards: metadata, completeness, and figures that come from records."""

import copy
import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from huggingface_hub import ModelCard
from huggingface_hub.repocard_data import model_index_to_eval_results

from hf_domino.hub import adapter_card, dataset_card, drafter_card
from hf_domino.hub.results import result_of_benchmark
from tests.hub.helpers import DRAFTER, TARGET, adapter_record, benchmark, raw_benchmark, record


@pytest.fixture
def config(staged: Path) -> dict[str, Any]:
    return json.loads((staged / "config.json").read_text())


def dataset_record() -> dict[str, Any]:
    return {
        "repo_id": "org/tiny-text",
        "license": "apache-2.0",
        "language": ["en"],
        "summary": "Answers.",
        "target": {"name": TARGET, "revision": "main", "chat_template": "its own", "thinking_mode": "none"},
        "data": {
            "rows": 100,
            "tokens": 2000,
            "temperatures": [0.0, 0.8],
            "max_new_tokens": 256,
            "columns": {"prompt": "what was asked", "response": "what the target answered"},
            "sources": [{"name": "gsm8k", "license": "MIT", "description": "training split"}],
            "overlap_check": "checked by scripts/prepare_data.py.",
            "commands": ["python scripts/prepare_data.py"],
        },
        "not_established": ["that the answers are right"],
    }


def metadata(card: Any) -> dict[str, Any]:
    return yaml.safe_load(re.match(r"---\n(.*?)\n---\n", str(card), re.DOTALL)[1])


def test_metadata_of_a_drafter(config: dict[str, Any]) -> None:
    data = metadata(drafter_card(config, record()))
    assert data["base_model"] == TARGET
    assert {"domino", "speculative-decoding", "draft-model", "dflash"} <= set(data["tags"])
    assert data["license"] == "apache-2.0"
    assert data["library_name"] == "transformers"
    assert "pipeline_tag" not in data
    name, results = model_index_to_eval_results(data["model-index"])
    assert name == "tiny-target-Domino"
    assert {(r.dataset_name, r.metric_type, r.metric_value) for r in results} == {
        ("gsm8k", "acceptance_length", 2.5),
        ("gsm8k", "speedup", 1.8),
    }
    assert "bfloat16, temperature 0" in results[0].dataset_config


def test_results_at_two_temperatures_stay_apart(config: dict[str, Any]) -> None:
    results = [benchmark(2.5), benchmark(2.0) | {"temperature": 0.7}]
    data = metadata(drafter_card(config, record(results=results)))
    found = model_index_to_eval_results(data["model-index"])[1]
    assert sorted(r.metric_value for r in found if r.metric_type == "acceptance_length") == [2.0, 2.5]
    assert len({r.dataset_config for r in found}) == 2


@pytest.mark.parametrize("kind", ["drafter", "adapter", "dataset"])
def test_cards_survive_reading_and_have_no_unfilled_field(config: dict[str, Any], kind: str) -> None:
    card = {
        "drafter": lambda: drafter_card(config, record()),
        "adapter": lambda: adapter_card(adapter_record()),
        "dataset": lambda: dataset_card(dataset_record()),
    }[kind]()
    text = str(card)
    assert type(card)(text).data.to_dict() == card.data.to_dict()
    assert not re.search(r"\{\{|\}\}|\{%|None|undefined|TODO|More Information Needed|\| +\|$", text, re.MULTILINE)
    tables = re.findall(r"^\|.*\|$", text, re.MULTILINE)
    assert tables and all(line.count("|") in (3, 8) for line in tables)
    assert text.count("```") % 2 == 0


def paths(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Of all fields in a record that a card must show."""
    if isinstance(value, dict):
        found = [p for key, item in value.items() if key != "methods" for p in paths(item, (*path, key))]
        return ([path] if path else []) + found
    return [path]


REQUIRED = [
    path
    for path in paths(record())
    if path[0] not in ("results", "language") and len(path) < 3 and path != ("training", "settings")
]


@pytest.mark.parametrize("path", REQUIRED, ids=".".join)
@pytest.mark.parametrize("how", ["absent", "empty"])
def test_a_record_that_lacks_a_field_is_refused(config: dict[str, Any], path: tuple[str, ...], how: str) -> None:
    broken = copy.deepcopy(record())
    parent = broken
    for key in path[:-1]:
        parent = parent[key]
    if how == "absent":
        del parent[path[-1]]
    else:
        parent[path[-1]] = None
    with pytest.raises((ValueError, TypeError)):
        drafter_card(config, broken)


@pytest.mark.parametrize("key", ["engine", "hardware", "dtype", "temperature", "command", "methods"])
def test_figures_without_their_conditions_are_refused(config: dict[str, Any], key: str) -> None:
    result = benchmark()
    del result[key]
    with pytest.raises(ValueError, match=key):
        drafter_card(config, record(results=[result]))


def test_the_table_holds_the_record_s_figures(config: dict[str, Any]) -> None:
    text = drafter_card(config, record()).text
    assert "| gsm8k | domino | 40.0 | 1.80x | 1.70 to 1.90 | 2.50 | 100% |" in text
    assert "| gsm8k | plain | 22.2 | 1.00x | - | - | - |" in text


def test_a_result_comes_from_a_benchmark_record(config: dict[str, Any]) -> None:
    result = result_of_benchmark(raw_benchmark(3.0))
    assert "native-dflash" not in result["methods"] and "rows" not in result
    text = drafter_card(config, record(results=[result])).text
    assert "Engine: transformers 5.24.0, torch 2.13.0; hardware: A CPU, 2 threads; dtype: bfloat16" in text
    assert "--methods plain domino --max-new-tokens 128 --temperature 0.0 --seed 0" in text
    assert "| gsm8k | domino | 40.0 | 1.80x | 1.70 to 1.90 | 3.00 | 100% |" in text
    with pytest.raises(ValueError, match="no record of scripts/benchmark.py: it lacks 'environment'"):
        result_of_benchmark({})


def test_what_a_reader_has_to_know(config: dict[str, Any]) -> None:
    text = drafter_card(config, record()).text
    assert "**This is not a standalone model.**" in text
    assert "| Block | 6 rows, 6 drafts; a row predicts the token after it |" in text
    assert "- anything beyond tests" in text
    assert "Not measured yet." in drafter_card(config, record(results=[])).text


def test_metadata_of_adapters_and_datasets() -> None:
    data = metadata(adapter_card(adapter_record()))
    assert (data["base_model"], data["base_model_relation"], data["library_name"]) == (DRAFTER, "adapter", "peft")
    data = metadata(dataset_card(dataset_record()))
    assert "domino" in data["tags"] and data["pretty_name"] == "tiny-text"


def test_the_published_card_is_the_record_s(staged: Path, config: dict[str, Any]) -> None:
    kept = json.loads((staged / "card_record.json").read_text())
    assert kept == record()
    assert str(ModelCard.load(staged / "README.md")) == str(drafter_card(config, kept))
