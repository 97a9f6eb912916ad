"""The benchmark from prompts to record, on a tiny pair."""

import copy
import json
import math

import pytest
import torch

from hf_domino.evaluation import benchmark
from hf_domino.evaluation.benchmark import Settings, run
from hf_domino.evaluation.measuring import measure
from hf_domino.evaluation.near_ties import near_tie
from hf_domino.evaluation.prompts import Prompt
from hf_domino.evaluation.record import PartialResults
from hf_domino.evaluation.spec_bench import write_answers
from hf_domino.evaluation.summary import summarise

METHODS = ["domino", "native-dflash", "assisted", "domino-chain"]
KEYS = {
    "tokens_per_second",
    "speedup",
    "speedup_ci95",
    "acceptance_length",
    "identical",
    "draft_seconds",
    "verify_seconds",
    "other_seconds",
}


def prompts():
    return [
        Prompt("mt_bench", ("Write code.", "And again?"), {"question_id": 7, "category": "coding"}),
        Prompt("sums", ("What is it?",), {"answer": "#### 3"}),
        Prompt("sums", ("And what is that?",), {"answer": "#### 4"}),
    ]


@pytest.fixture(scope="module")
def record(contenders, tmp_path_factory):
    settings = Settings(methods=METHODS, max_new_tokens=12)
    return run(contenders, prompts(), settings, tmp_path_factory.mktemp("run") / "record.json")


def test_record_has_the_promised_keys(record):
    assert set(record) >= {"environment", "settings", "prompts", "methods", "cost_of_a_draft_round"}
    for name in ("plain", "domino", "native-dflash", "domino-chain"):
        result = record["methods"][name]
        assert KEYS <= set(result["overall"])
        assert list(result["sets"]) == ["mt_bench", "sums"]
        assert all(KEYS <= set(figures) for figures in result["sets"].values())
    assert record["methods"]["assisted"] == {"unavailable": "no small assistant model was given"}
    assert "moved by one" in record["methods"]["native-dflash"]["note"]
    assert record["prompts"] == {"mt_bench": [prompts()[0].hash], "sums": [p.hash for p in prompts()[1:]]}
    assert {"torch", "transformers", "threads", "processor", "dtype"} <= set(record["environment"])
    assert record["cost_of_a_draft_round"]["domino"]["synchronisations"] == 1


def test_figures_follow_from_the_rows(record):
    rows = [row for row in record["rows"] if row["method"] == "domino"]
    overall = record["methods"]["domino"]["overall"]
    assert len(rows) == 4  # two turns and two prompts
    assert overall["prompts"] == 3
    rounds = [count for row in rows for count in row["accepted"]]
    assert overall["acceptance_length"] == 1 + sum(rounds) / len(rounds) > 1.2
    assert overall["tokens"] == sum(row["tokens"] for row in rows) == sum(rounds) + len(rounds) + len(rows)
    parts = overall["draft_seconds"] + overall["verify_seconds"] + overall["other_seconds"]
    assert math.isclose(parts, sum(row["seconds"] for row in rows))
    assert record["methods"]["plain"]["overall"]["speedup"] == 1
    assert record["methods"]["plain"]["overall"]["acceptance_length"] == 1
    assert record["methods"] == summarise(record["rows"], greedy=True) | {
        name: result for name, result in record["methods"].items() if "unavailable" in result or "note" in result
    }


def test_float32_is_identical_and_quality_is_unchanged(record):
    for name in ("domino", "native-dflash", "domino-chain"):
        assert record["methods"][name]["overall"]["identical"] == 1
        assert record["methods"][name]["differences"] == []
        assert record["methods"][name]["overall"]["quality"] == record["methods"]["plain"]["overall"]["quality"]
    assert set(record["methods"]["plain"]["sets"]["sums"]["quality"]) == {"exact_match"}
    assert "quality" not in record["methods"]["plain"]["sets"]["mt_bench"]


def test_second_turns_hold_the_first_answer(record):
    first, second = (row for row in record["rows"] if row["set"] == "mt_bench" and row["method"] == "plain")
    assert second["prompt_tokens"] > first["prompt_tokens"] + first["tokens"]
    lengths = {row["prompt_tokens"] for row in record["rows"] if row["set"] == "mt_bench" and row["turn"] == 1}
    assert lengths == {second["prompt_tokens"]}


def test_spec_bench_answers(record, tmp_path):
    write_answers(record["rows"], "domino", "ours", tmp_path / "ours.jsonl")
    lines = [json.loads(line) for line in (tmp_path / "ours.jsonl").read_text().splitlines()]
    assert [(line["question_id"], line["category"], line["model_id"]) for line in lines] == [
        (7, "coding", "ours"),
        (1, "sums", "ours"),
        (2, "sums", "ours"),
    ]
    choice = lines[0]["choices"][0]
    assert len(choice["turns"]) == len(choice["wall_time"]) == len(choice["new_tokens"]) == 2
    assert sum(choice["accept_lengths"]) + 2 == sum(choice["new_tokens"])
    with pytest.raises(ValueError, match="no rows"):
        write_answers(record["rows"], "assisted", "x", tmp_path / "x.jsonl")


def test_interrupted_run_goes_on(contenders, tmp_path, monkeypatch):
    output, settings = tmp_path / "record.json", Settings(methods=["domino"], max_new_tokens=6)
    original, measured = benchmark._measure_unit, []

    def interrupted(name, *args):
        if len(measured) == 2:
            raise KeyboardInterrupt
        measured.append(name)
        return original(name, *args)

    monkeypatch.setattr(benchmark, "_measure_unit", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(contenders, prompts(), settings, output)
    assert not output.exists()
    partial = tmp_path / "record.json.partial.jsonl"
    partial.write_text(partial.read_text() + '{"unit": "cut o')
    with pytest.raises(ValueError, match="another run"):
        run(contenders, prompts(), Settings(methods=["domino"], max_new_tokens=7), output)

    later = []
    monkeypatch.setattr(benchmark, "_measure_unit", lambda name, *args: later.append(name) or original(name, *args))
    record = run(contenders, prompts(), settings, output)
    assert len(later) == 1
    assert [row["unit"] for row in record["rows"] if row["turn"] == 0 and row["method"] == "plain"] == measured + later
    assert output.exists()
    assert not partial.exists()


def test_time_limit_keeps_what_was_measured(contenders, tmp_path):
    record = run(contenders, prompts(), Settings(methods=["domino"], max_new_tokens=4), tmp_path / "r.json", seconds=0)
    assert list(record["prompts"]) == ["mt_bench"]
    assert record["methods"]["domino"]["overall"]["prompts"] == 1


def test_batches_take_one_set_at_a_time(contenders, tmp_path):
    settings = Settings(methods=["domino", "prompt-lookup"], max_new_tokens=6, batch_size=2)
    record = run(contenders, prompts(), settings, tmp_path / "r.json")
    assert [row["set"] for row in record["rows"]] == ["mt_bench", "mt_bench", "sums", "sums"]
    assert record["methods"]["domino"]["overall"]["identical"] == 1
    assert "batch" in record["methods"]["prompt-lookup"]["unavailable"]


def test_of_repeated_calls_the_one_of_median_time_counts(contenders, tmp_path, monkeypatch):
    made = []
    monkeypatch.setattr(benchmark, "measure", lambda *args, **kwargs: made.append(measure(*args, **kwargs)) or made[-1])

    record = run(contenders, prompts()[1:], Settings(["domino"], max_new_tokens=6, repeats=3), tmp_path / "record.json")

    assert len(record["rows"]) == 2 * 2  # prompts, methods
    assert len(made) == 2 + 3 * 2 * 2  # warm-up of each, then three times each
    for row in record["rows"]:
        assert row["seconds"] == sorted(row["seconds_of_repeats"])[1]
    assert sorted(s for row in record["rows"] for s in row["seconds_of_repeats"]) == sorted(m.seconds for m in made[2:])


def test_sampling_has_no_near_ties(contenders, tmp_path):
    settings = Settings(methods=["domino"], max_new_tokens=6, temperature=0.7)
    record = run(contenders, prompts(), settings, tmp_path / "r.json")
    assert "differences" not in record["methods"]["domino"]
    assert record["methods"]["domino"]["overall"]["identical"] == 1


def test_code_is_run_only_when_asked(contenders, tmp_path):
    row = {"prompt": "x = 1\n", "test": "assert x", "entry_point": None}
    for asked in (False, True):
        settings = Settings(methods=[], max_new_tokens=4, run_code=asked)
        record = run(contenders, [Prompt("s", ("Write x.",), row)], settings, tmp_path / f"{asked}.json")
        assert ("quality" in record["methods"]["plain"]["overall"]) is asked


@pytest.mark.parametrize("settings", [{"max_new_tokens": 1}, {"temperature": -1.0}, {"batch_size": 0}, {"repeats": 0}])
def test_bad_settings(settings):
    with pytest.raises(ValueError, match=next(iter(settings))):
        Settings(**settings)


def test_near_tie_tells_a_tie_from_an_error(contenders):
    model = copy.deepcopy(contenders.model)
    prompt = [5, 9, 14]
    ids = torch.tensor([prompt])
    plain = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=5, do_sample=False)[0, 3:].tolist()
    assert near_tie(model, prompt, plain, plain) is None
    logits = model(torch.tensor([prompt + plain[:2]])).logits[0, -1]
    second = int(logits.topk(2).indices[1])
    found = near_tie(model, prompt, plain, [*plain[:2], second, 4])
    assert found["position"] == 2
    assert (found["plain"], found["ours"], found["top2"]) == (plain[2], second, True)
    assert math.isclose(found["margin"], float(logits.max() - logits[second]), rel_tol=1e-4)
    assert math.isclose(found["gap"], found["margin"], rel_tol=1e-4)
    worst = int(logits.argmin())
    wrong = near_tie(model, prompt, plain, [*plain[:2], worst])
    assert not wrong["top2"] and math.isclose(wrong["gap"], float(logits.max() - logits.min()), rel_tol=1e-4)
    ended = near_tie(model, prompt, plain, plain[:2])
    assert ended["ours"] is None and ended["gap"] is None


def test_partial_results_of_nothing_are_an_empty_start(tmp_path):
    partial = PartialResults(tmp_path / "deep" / "r.json", {"a": 1})
    assert partial.finished == {}
    partial.add("u", [{"x": 1}])
    assert PartialResults(tmp_path / "deep" / "r.json", {"a": 1}).finished == {"u": [{"x": 1}]}
