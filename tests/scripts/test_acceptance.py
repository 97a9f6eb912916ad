"""`scripts/acceptance.py` in-process, on a tiny target: a drafter and an adapter of it, and going on afterwards."""

import json

import pytest
import torch

from hf_domino import DominoDraftModel
from hf_domino.training.lora import LoraArguments, add_adapter, save_adapter
from scripts import acceptance
from tests.tiny import skilled_drafter, tiny_target
from tests.training.conftest import word_tokenizer


@pytest.fixture
def folders(tmp_path):
    target = tiny_target()
    target.save_pretrained(tmp_path / "target")
    word_tokenizer().save_pretrained(tmp_path / "target")
    skilled_drafter(target).save_pretrained(tmp_path / "drafter")
    model = add_adapter(DominoDraftModel.from_pretrained(tmp_path / "drafter"), LoraArguments(lora_rank=2))
    save_adapter(model, tmp_path / "adapter", torch.float32)
    for name, words in (("own", "w7 w8"), ("other", "w20 w21")):
        rows = [json.dumps({"prompt": f"{words} w{i}"}) + "\n" for i in (30, 31)]
        (tmp_path / f"{name}.jsonl").write_text("".join(rows))
    return tmp_path


def run(folders, *drafters, output="record.json", tokens="12"):
    return acceptance.main(
        [
            "--model", str(folders / "target"),
            "--prompts", str(folders / "own.jsonl"), str(folders / "other.jsonl"),
            "--drafters", *(f"{name}={folders / name}" for name in drafters),
            "--output", str(folders / output),
            "--max-new-tokens", tokens,
            "--threads", str(torch.get_num_threads()),
        ]
    )  # fmt: skip


def test_a_drafter_and_its_adapter(folders, capsys):
    record = run(folders, "drafter", "adapter")
    assert set(record["summary"]) == {"own", "other"}
    for figures in record["summary"].values():
        stock, adapted = figures["drafter"], figures["adapter"]
        assert stock["prompts"] == stock["identical"] == 2 and stock["ratio"] == 1.0
        # A new adapter changes nothing, so it drafts what the stock drafter drafts.
        assert adapted["acceptance_length"] == stock["acceptance_length"] > 1
    rows = [row for row in record["rows"] if row["drafter"] == "drafter"]
    assert all(1 + sum(row["accepted"]) + len(row["accepted"]) == len(row["tokens"]) for row in rows)
    assert "same tokens in 2 of 2" in capsys.readouterr().out


def test_settings_of_a_drafter_in_brackets(folders):
    drafter = folders / "drafter"
    arguments = ["--model", str(folders / "target"), "--prompts", str(folders / "own.jsonl"), "--max-new-tokens", "12"]
    arguments += ["--output", str(folders / "settings.json"), "--drafters", f"tree={drafter}"]
    record = acceptance.main([*arguments, f"one={drafter}[max_tree_nodes=1,draft_sources=drafter]"])
    assert max(max(row["accepted"], default=0) for row in record["rows"] if row["drafter"] == "one") == 1
    assert max(max(row["accepted"], default=0) for row in record["rows"] if row["drafter"] == "tree") > 1
    with pytest.raises(ValueError, match="adapter.*whole drafters"):
        acceptance.main([*arguments, f"adapter={folders / 'adapter'}[max_tree_nodes=1]"])


def test_it_goes_on_and_takes_further_drafters(folders, monkeypatch):
    first = run(folders, "drafter")
    calls = []
    measure = acceptance.measure
    monkeypatch.setattr(acceptance, "measure", lambda *a, **k: calls.append(a[1].drafter) or measure(*a, **k))
    both = run(folders, "drafter", "adapter")
    assert len(calls) == 4 and None not in calls, "only the adapter was measured"
    assert both["rows"][: len(first["rows"])] == first["rows"]


def test_what_does_not_fit_is_refused(folders):
    run(folders, "drafter")
    with pytest.raises(ValueError, match="another --output"):
        run(folders, "drafter", tokens="9")
    with pytest.raises(SystemExit):
        acceptance.main(["--prompts", "x", "--drafters", "plain=y", "--output", str(folders / "z.json")])
    (folders / "drafter").rename(folders / "elsewhere")
    with pytest.raises(ValueError, match="rename"):
        acceptance.main(
            [
                "--model", str(folders / "target"),
                "--prompts", str(folders / "own.jsonl"),
                "--drafters", f"drafter={folders / 'elsewhere'}",
                "--output", str(folders / "record.json"),
                "--max-new-tokens", "12",
            ]
        )  # fmt: skip
