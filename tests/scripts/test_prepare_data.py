"""`scripts/prepare_data.py` in-process, on a tiny target."""

import gzip
import json

import pytest
import torch

from hf_domino.training.data import PROVENANCE, ShardDataset
from hf_domino.training.prompts import user_turn_template
from scripts import prepare_data
from tests.tiny import tiny_target
from tests.training.conftest import word_tokenizer


@pytest.fixture(scope="module")
def target_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("target")
    tiny_target(context=0.7).save_pretrained(folder)
    word_tokenizer().save_pretrained(folder)
    return str(folder)


def write_jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def prepare(target, output, *flags):
    return prepare_data.main(
        [
            "--output",
            str(output),
            "--target",
            target,
            "--dtype",
            "float32",
            "--max_new_tokens",
            "8",
            "--max_length",
            "48",
            "--batch_size",
            "4",
            *flags,
        ]
    )


def test_answers_are_the_target_s_and_only_they_are_supervised(target_folder, tmp_path):
    prompts = write_jsonl(tmp_path / "p.jsonl", [{"prompt": f"w{10 + i} w{20 + i}"} for i in range(9)])
    counts = prepare(
        target_folder,
        tmp_path / "out",
        "--prompts",
        prompts,
        "--greedy_share",
        "1",
        "--tapped_states",
        "--target_layer_ids",
        "0",
        "2",
    )
    dataset = ShardDataset(tmp_path / "out")
    assert len(dataset) == counts["sequences"] == 9
    target = tiny_target(context=0.7)
    seen = set()
    for item in (dataset[i] for i in range(9)):
        ids, answer = item["input_ids"], item["loss_mask"]
        prompt = ids[~answer]
        assert prompt.tolist()[0] == 4 and prompt.tolist()[-2:] == [6, 5], "the chat template"
        seen.add(tuple(prompt.tolist()))
        text = target.generate(prompt[None], do_sample=False, max_new_tokens=8)[0]
        assert torch.equal(ids, text)
        hidden = target(ids[None], output_hidden_states=True).hidden_states
        states = torch.cat([hidden[1][0], hidden[3][0]], -1)
        torch.testing.assert_close(item["tapped_states"][:-1].float(), states[:-1], rtol=2e-2, atol=5e-2)
    assert len(seen) == 9
    record = json.loads((tmp_path / "out" / PROVENANCE).read_text())
    assert record["settings"]["target"] == target_folder
    assert len(record["settings"]["chat_template_sha256"]) == 64
    assert record["complete"]


def test_a_run_cut_short_goes_on(target_folder, tmp_path, monkeypatch):
    prompts = write_jsonl(tmp_path / "p.jsonl", [{"question": f"w{10 + i} w{20 + i}"} for i in range(12)])
    flags = ["--prompts", prompts, "--greedy_share", "0.5", "--shard_tokens", "30"]
    from hf_domino.training.shards import ShardWriter

    add, calls = ShardWriter.add, []

    def add_until_killed(self, *arguments):
        if len(calls) == 7:
            raise KeyboardInterrupt
        calls.append(arguments)
        add(self, *arguments)

    monkeypatch.setattr(ShardWriter, "add", add_until_killed)
    with pytest.raises(KeyboardInterrupt):
        prepare(target_folder, tmp_path / "out", *flags)
    kept = len(ShardDataset(tmp_path / "out"))
    assert 0 < kept < 12
    monkeypatch.setattr(ShardWriter, "add", add)
    counts = prepare(target_folder, tmp_path / "out", *flags)
    dataset = ShardDataset(tmp_path / "out")
    assert counts["sequences"] == len(dataset) == 12
    assert len({tuple(item["input_ids"][~item["loss_mask"]].tolist()) for item in dataset}) == 12
    assert prepare(target_folder, tmp_path / "out", *flags)["sequences"] == 12, "again: nothing left to do"
    with pytest.raises(ValueError, match="other settings.*temperature"):
        prepare(target_folder, tmp_path / "out", *flags, "--temperature", "0.3")


def test_evaluation_prompts_are_left_out(target_folder, tmp_path):
    rows = [{"prompt": f"w{10 + i} w11 w12 w13 w14 w15"} for i in range(4)]
    prompts = write_jsonl(tmp_path / "p.jsonl", rows)
    held_out = write_jsonl(tmp_path / "eval.jsonl", [{"turns": ["W12, w11 w12 w13 w14 w15!", "w40"]}])
    counts = prepare(target_folder, tmp_path / "out", "--prompts", prompts, "--exclude", held_out)
    assert counts["sequences"] == 3
    found = json.loads((tmp_path / "out" / PROVENANCE).read_text())["exclusion"]
    assert found["prompts_left_out"] == [2]
    assert (found["prompts_checked"], found["evaluation_prompts"]) == (4, 2)
    assert found["files"][0]["file"] == "eval.jsonl"


def test_further_turns_follow_on_the_target_s_own_answers(target_folder, tmp_path):
    prompts = write_jsonl(tmp_path / "p.jsonl", [{"turns": [f"w{10 + i}", "w9"]} for i in range(40)])
    prepare(target_folder, tmp_path / "out", "--prompts", prompts, "--greedy_share", "0", "--temperature", "2")
    items = list(ShardDataset(tmp_path / "out"))
    firsts = [item for item in items if item["input_ids"][~item["loss_mask"]].tolist()[3:] == [5]]
    assert len(firsts) == 40
    finished = [item for item in firsts if item["input_ids"][-1] == 1]
    seconds = [item for item in items if (item["input_ids"] == 4).sum() >= 2 and not any(item is f for f in firsts)]
    assert len(seconds) == len(finished) > 0, "a second turn wherever the first answer ended"
    second = seconds[0]["input_ids"].tolist()
    first = next(item["input_ids"].tolist() for item in finished if item["input_ids"][1] == second[1])
    assert second[: len(first) - 1] == first[:-1], "the first answer is part of the second prompt"


def test_answers_there_already_are_converted(target_folder, tmp_path):
    rows = [{"prompt": f"w{10 + i}", "response": "w20 w21", "finished": i % 2 == 0} for i in range(5)]
    with gzip.open(tmp_path / "r.jsonl.gz", "wt") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    counts = prepare(target_folder, tmp_path / "out", "--responses", str(tmp_path / "r.jsonl.gz"), "--tapped_states")
    assert counts["sequences"] == 5
    dataset = ShardDataset(tmp_path / "out")
    by_prompt = {item["input_ids"][1].item(): item for item in dataset}
    assert by_prompt[10]["input_ids"].tolist() == [4, 10, 6, 5, 20, 21, 1], "finished: the end of text follows"
    assert by_prompt[11]["input_ids"].tolist() == [4, 11, 6, 5, 20, 21]
    target = tiny_target(context=0.7)
    layers = dataset.provenance["settings"]["target_layer_ids"]
    hidden = target(by_prompt[10]["input_ids"][None], output_hidden_states=True).hidden_states
    states = torch.cat([hidden[i + 1][0] for i in layers], -1)
    torch.testing.assert_close(by_prompt[10]["tapped_states"].float(), states, rtol=2e-2, atol=5e-2)


def test_prompts_are_drawn_from_the_target(target_folder, tmp_path):
    counts = prepare(target_folder, tmp_path / "out", "--self_prompts", "300", "--batch_size", "50")
    drawn = [json.loads(line)["prompt"] for line in (tmp_path / "out" / "self_prompts.jsonl").open()]
    assert 0 < len(drawn) <= 300 and len(set(drawn)) == len(drawn)
    assert counts["sequences"] == len(drawn)
    assert user_turn_template(word_tokenizer()) == ([4], 6)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "Nothing to do"),
        (["--prompts", "missing.jsonl"], "missing.jsonl"),
        (["--prompts", "p.jsonl", "--responses", "r.jsonl"], "two runs"),
        (["--prompts", "p.jsonl", "--greedy_share", "2"], "greedy_share"),
    ],
)
def test_mistakes_are_named(target_folder, tmp_path, flags, message):
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        prepare(target_folder, tmp_path / "out", *flags)


def test_a_row_without_a_prompt_is_named(target_folder, tmp_path):
    prompts = write_jsonl(tmp_path / "p.jsonl", [{"text": "w10"}])
    with pytest.raises(ValueError, match="none of prompt, turns"):
        prepare(target_folder, tmp_path / "out", "--prompts", prompts)


@pytest.mark.parametrize("kind", ["prompts", "responses"])
def test_the_target_s_distributions_are_stored_with_its_answers(target_folder, tmp_path, kind):
    rows = [{"prompt": f"w{10 + i}", "response": "w20 w21 w7", "finished": i % 2 == 0} for i in range(5)]
    source = write_jsonl(tmp_path / "p.jsonl", rows)
    flags = ["--teacher_top_k", "4", "--greedy_share", "1"]
    prepare(target_folder, tmp_path / "out", f"--{kind}", source, *flags)
    target = tiny_target(context=0.7)
    for item in ShardDataset(tmp_path / "out"):
        before = (item["loss_mask"][1:]).nonzero()[:, 0]  # the tokens after which an answer's token stands
        probabilities = target(item["input_ids"][None]).logits[0].softmax(-1)
        best, ids = probabilities.topk(4)
        assert torch.equal(item["teacher_ids"][before].long(), ids[before])
        torch.testing.assert_close(item["teacher_probs"][before].float(), best[before], rtol=1e-2, atol=1e-3)
        if kind == "prompts":
            assert torch.equal(item["teacher_ids"][before, 0].long(), item["input_ids"][before + 1]), "greedy"
