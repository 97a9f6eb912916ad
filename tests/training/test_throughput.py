"""The measuring commands: what they count is right, and their records hold what the tables need."""

import json
import math

import pytest
import torch

from hf_domino.training import data_throughput, throughput
from hf_domino.training.memory import Peak
from tests.tiny import prompt_ids, tiny_target

from .conftest import word_tokenizer


def test_training_throughput(tmp_path):
    target = tiny_target()
    shape = dict(block_size=4, layers=1, head_rank=8, head_hidden_size=32)
    arguments = throughput.ThroughputArguments(
        str(tmp_path / "r.json"), sequences=2, length=12, anchors=[1, 3], vocabulary=[20, 0], steps=2, **shape
    )
    record = throughput.measure(arguments, target)
    cells = [(entry["blocks"], entry["vocabulary"]) for entry in record["entries"]]
    assert cells == [(2, 20), (6, 20), (2, 61), (6, 61)]
    for entry in record["entries"]:
        assert entry["blocks"] < entry["supervised_drafts"] <= entry["blocks"] * 4
        assert len(entry["seconds"]) == 2 and entry["drafts_per_second"] > 0
        assert math.isclose(sum(entry["shares"].values()), 1, abs_tol=0.01)
        assert entry["shares"]["matrix products"] > 0 and entry["shares"]["optimizer"] > 0
    lines = throughput.table(json.loads(json.dumps(record))).splitlines()
    assert len(lines) == 2 + 4
    assert lines[-1].startswith("| 6 | 61 | ")


def test_peak_memory_is_what_was_held_at_most():
    with Peak(torch.device("cpu")) as peak:
        held = torch.ones(40 * 2**18)  # 40 MB
        assert held.sum() > 0
        del held
    assert 30 < peak.megabytes < 80


def test_data_throughput_counts_the_same_tokens_on_both_sides(tmp_path):
    target = tiny_target(context=0.7)
    prompts = tmp_path / "p.jsonl"
    rows = [" ".join(f"w{i}" for i in prompt_ids(2 + n % 3, seed=n)[0].tolist()) for n in range(9)]
    prompts.write_text("".join(json.dumps({"prompt": row}) + "\n" for row in rows))
    target.generation_config.eos_token_id = [11, 23, 37]  # texts end at various places
    arguments = data_throughput.DataThroughputArguments(
        [str(prompts)], str(tmp_path / "r.json"), batch_size=4, max_new_tokens=12, max_length=40, rounds=1
    )
    data_throughput.measure(arguments, target, word_tokenizer())
    arguments.rounds = 2
    record = data_throughput.measure(arguments, target, word_tokenizer())
    assert json.loads((tmp_path / "r.json").read_text()) == record
    assert record["settings"]["answered"] == 9
    assert len(record["rounds"]) == 2, "the first was kept"
    counted = {turn[name]["tokens"] for turn in record["rounds"] for name in ("plain", "refilled")}
    assert len(counted) == 1, "the same answers, however they were made"
    assert 9 < counted.pop() < 9 * 12, "and some ended early"
    found = data_throughput.speeds(record)
    assert found["ratio"] == found["refilled"] / found["plain"] > 0
    arguments.max_new_tokens = 5
    with pytest.raises(ValueError, match="other settings"):
        data_throughput.measure(arguments, target, word_tokenizer())
