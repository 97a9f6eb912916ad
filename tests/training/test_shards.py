"""Shards on disk: what is written is what is read, and a folder holds data of one kind."""

import json

import pytest
import torch

from hf_domino.training.data import PROVENANCE, ShardDataset, collate
from hf_domino.training.objective import Teacher
from hf_domino.training.shards import ShardWriter, Text


def states(length: int) -> torch.Tensor:
    return torch.arange(length * 4).view(length, 4).bfloat16()


def test_round_trip(tmp_path):
    writer = ShardWriter(tmp_path, {"seed": 1}, shard_tokens=8)
    writer.add([Text([5, 6, 7], [8, 9], states(5))], 0)
    writer.add([Text([5], [8, 9, 10], states(3))], 4)  # as generation gives it: no state for the last token
    writer.add([Text([6], [3], states(2)), Text([6, 3, 7], [4], states(4))], 2)
    writer.flush()
    dataset = ShardDataset(tmp_path)
    assert len(dataset.files) == 2 and len(dataset) == 4
    assert dataset.lengths == [5, 4, 2, 4]
    assert dataset[0]["loss_mask"].tolist() == [False] * 3 + [True] * 2
    assert torch.equal(dataset[0]["tapped_states"], states(5))
    assert torch.equal(dataset[1]["tapped_states"][:3], states(3))
    assert dataset[1]["tapped_states"][3].abs().sum() == 0
    assert dataset.token_counts(12).nonzero()[:, 0].tolist() == [3, 4, 8, 9, 10]
    assert dataset.provenance["counts"] == {"sequences": 4, "tokens": 15, "supervised_tokens": 7}


def test_a_second_writer_goes_on(tmp_path):
    first = ShardWriter(tmp_path, {"seed": 1}, shard_tokens=4)
    first.add([Text([5, 6], [8, 9])], 3)
    second = ShardWriter(tmp_path, {"seed": 1}, shard_tokens=4)
    assert second.done == {3}
    second.add([Text([5, 6], [8, 9])], 4)
    second.flush()
    assert len(ShardDataset(tmp_path)) == 2
    assert json.loads((tmp_path / PROVENANCE).read_text())["counts"]["sequences"] == 2
    assert not list(tmp_path.glob("*.tmp"))


def test_other_settings_are_refused(tmp_path):
    ShardWriter(tmp_path, {"seed": 1, "target": "a"}).flush()
    with pytest.raises(ValueError, match="other settings.*target"):
        ShardWriter(tmp_path, {"seed": 1, "target": "b"})


def test_an_empty_folder_says_how_to_fill_it(tmp_path):
    with pytest.raises(FileNotFoundError, match="prepare_data"):
        ShardDataset(tmp_path)


def test_collate_pads_on_the_right(tmp_path):
    writer = ShardWriter(tmp_path, {})
    writer.add([Text([5, 6, 7], [8, 9], states(5)), Text([5], [8], states(2))], 0)
    writer.flush()
    dataset = ShardDataset(tmp_path, max_length=4)
    batch = collate([dataset[0], dataset[1]])
    assert batch["input_ids"].tolist() == [[5, 6, 7, 8], [5, 8, 0, 0]]
    assert batch["loss_mask"].int().tolist() == [[0, 0, 0, 1], [0, 1, 0, 0]]
    assert batch["lengths"].tolist() == [4, 2] and batch["index"].tolist() == [0, 1]
    assert batch["tapped_states"].shape == (2, 4, 4)


def test_distributions_stand_at_the_tokens_before_those_they_predict(tmp_path):
    writer = ShardWriter(tmp_path, {})
    teacher = Teacher(torch.tensor([[4, 2], [9, 1], [3, 5]]), torch.tensor([[0.75, 0.125], [0.5, 0.25], [1.0, 0.0]]))
    writer.add([Text([5, 6], [4, 9, 3], states(4), teacher), Text([7], [4, 9, 3], states(3), teacher)], 0)
    writer.flush()
    dataset = ShardDataset(tmp_path)
    assert dataset.stored == ["tapped_states", "teacher_ids", "teacher_probs"]
    for item, first in ((dataset[0], 1), (dataset[1], 0)):
        assert torch.equal(item["teacher_ids"][first : first + 3].long(), teacher.ids)
        assert torch.equal(item["teacher_probs"][first : first + 3].float(), teacher.probs)
        assert item["teacher_probs"][first + 3 :].abs().sum() == item["teacher_probs"][:first].abs().sum() == 0
        assert torch.equal(item["input_ids"][first + 1 : first + 4], item["teacher_ids"][first : first + 3, 0].long())
