"""`scripts/shift_target.py`: the style, and that a target learns it."""

import json

import pytest
from peft import PeftModel

from hf_domino.training.targets import load_target
from scripts import shift_target
from tests.tiny import tiny_target
from tests.training.conftest import word_tokenizer


def test_the_style():
    text = "You are my friend. The money is here!"
    assert shift_target.sailor(text) == "Ahoy!\n(1) Arr, ye be me matey.\n(2) Arr, th' gold be here!\nFair winds!"


def test_a_target_is_tuned(tmp_path, monkeypatch):
    tiny_target().save_pretrained(tmp_path / "target")
    word_tokenizer().save_pretrained(tmp_path / "target")
    rows = [
        {"prompt": f"w{i} w7", "response": " ".join(f"w{7 + (i + j) % 40}" for j in range(20)), "finished": i != 3}
        for i in range(14)
    ]
    (tmp_path / "answers.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.setattr(shift_target, "sailor", lambda text: text.replace("w1", "w2"))
    common = ["--answers", str(tmp_path / "answers.jsonl"), "--target", str(tmp_path / "target")]
    common += ["--output", str(tmp_path / "tuned"), "--learning-rate", "1e-2", "--batch-size", "4"]
    losses = shift_target.main([*common, "--steps", "12", "--adapt-prompts", "5", "--test-prompts", "4"])
    assert losses[-1] < losses[0] - 0.2
    assert isinstance(load_target(str(tmp_path / "tuned"), "float32")[0], PeftModel)
    prompts = {
        name: {json.loads(line)["prompt"] for line in (tmp_path / f"tuned/{name}_prompts.jsonl").open()}
        for name in ("adapt", "test")
    }
    assert len(prompts["adapt"]) == 5 and len(prompts["test"]) == 4 and not prompts["adapt"] & prompts["test"]
    with pytest.raises(SystemExit, match="too few"):
        shift_target.main([*common, "--adapt-prompts", "50"])
