"""A study trains its variants alike, measures them alike, and goes on where it was cut short."""

import json

import pytest
import torch

from hf_domino.drafter.modeling_domino import DominoDraftModel
from hf_domino.training.data import ShardDataset
from hf_domino.training.run import RunArguments
from hf_domino.training.study import STUDIES, StudyArguments, run_study, table, teacher_forced
from hf_domino.training.trainer import DominoTrainer

from .conftest import answers_mask, small_drafter, training_arguments, word_tokenizer, write_shard

SHAPE = ["block_size=4", "num_hidden_layers=1", "head_rank=8", "head_hidden_size=32"]


@pytest.fixture
def two_shards(texts, tmp_path):
    folder = write_shard(tmp_path / "data", list(texts[:60]), [answers_mask(40)] * 60)
    (folder / "shard-00000.safetensors").rename(folder / "shard-00001.safetensors")
    return write_shard(folder, list(texts[60:]), [answers_mask(40)] * 36)


def study_of(folder, record, target, study="curriculum", **more):
    names = {field: more.pop(field) for field in ("variants", "held_out") if field in more}
    settings = StudyArguments(study, str(record), names.get("variants", []), measured_sequences=8)
    run = RunArguments(data=str(folder), drafter=SHAPE, held_out=names.get("held_out"), held_out_limit=2)
    args = training_arguments(folder / "out", **(dict(max_steps=8, eval_max_new_tokens=8) | more))
    return run_study(settings, run, args, target, word_tokenizer())


def test_the_curriculum_study(target, two_shards, tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"w{20 + i} w{30 + i}"}) + "\n" for i in range(4)))
    record = study_of(two_shards, tmp_path / "record.json", target, held_out=str(prompts))
    assert json.loads((tmp_path / "record.json").read_text()) == record
    found = record["variants"]
    assert list(found) == list(STUDIES["curriculum"])
    assert record["data"]["train_sequences"] == 36, "the last shard is held out"
    assert all(entry["accepted_length"] >= 1 and entry["seconds"] > 0 for entry in found.values())
    lines = table(record).splitlines()
    assert len(lines) == 2 + len(found) and lines[0].count("|") == lines[2].count("|") == 9
    twin = found["twin without head"]
    assert twin["base_loss"] == twin["final_loss"]
    assert found["base only"]["base_loss"] == found["base only"]["final_loss"], "its head was never trained"
    assert found["final only"]["final_loss"] != found["anchored"]["final_loss"]
    left = DominoDraftModel.from_pretrained(two_shards / "out" / "twin_without_head")
    assert left.config.head_type == "none"


def test_a_study_goes_on_with_what_its_record_lacks(target, two_shards, tmp_path):
    record = tmp_path / "record.json"
    study_of(two_shards, record, target, variants=["final only"])
    before = json.loads(record.read_text())["variants"]["final only"]
    both = study_of(two_shards, record, target, variants=["final only", "base only"])
    assert both["variants"]["final only"] == before
    assert set(both["variants"]) == {"final only", "base only"}
    with pytest.raises(ValueError, match="other settings"):
        study_of(two_shards, record, target, learning_rate=1.0)


def test_the_start_study_compares_a_warm_start_with_a_cold_one(target, two_shards, tmp_path):
    found = study_of(two_shards, tmp_path / "r.json", target, "start", max_steps=1, learning_rate=1e-6)["variants"]
    assert (found["warm"]["changes"]["warm"], found["cold"]["changes"]["warm"]) == (True, False)
    assert found["warm"]["base_loss"] != found["cold"]["base_loss"], "one step of no size: what differs is the start"


def test_measurement_is_the_same_each_time_and_leaves_the_drafter_alone(target, two_shards, tmp_path):
    drafter = small_drafter(target)
    before = {name: tensor.clone() for name, tensor in drafter.state_dict().items()}
    trainer = DominoTrainer(drafter, target, training_arguments(tmp_path), ShardDataset(two_shards))
    first = teacher_forced(trainer, ShardDataset(two_shards), 8)
    assert teacher_forced(trainer, ShardDataset(two_shards), 8) == first
    assert all(torch.equal(tensor, before[name]) for name, tensor in drafter.state_dict().items())


def test_unknown_names_are_refused(tmp_path):
    with pytest.raises(ValueError, match="no study 'curricula'"):
        StudyArguments("curricula", "record.json")
    with pytest.raises(ValueError, match="no variant middling"):
        StudyArguments("start", "record.json", ["middling"])


def test_going_on_from_a_drafter_cannot_change_its_shape(target, two_shards, tmp_path):
    small_drafter(target).save_pretrained(tmp_path / "drafter")
    run = RunArguments(data=str(two_shards), init_from=str(tmp_path / "drafter"))
    settings = StudyArguments("start", str(tmp_path / "r.json"), ["cold"])
    with pytest.raises(ValueError, match="init_from"):
        run_study(settings, run, training_arguments(tmp_path, max_steps=1), target)


def test_a_prompt_is_not_needed(target, two_shards, tmp_path):
    record = study_of(two_shards, tmp_path / "r.json", target, "objective", variants=["kl"], max_steps=2)
    assert "accepted_length" not in record["variants"]["kl"]
