"""Staging a drafter: what the folder holds, and what is refused."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from hf_domino import DominoDraftModel
from hf_domino.hub import complete, inspect_folder, inspect_staged, stage, try_drafter
from hf_domino.hub.layout import AUTO_MAP, CHECKSUMS, CODE_FILES, GENERATE
from tests.hub.helpers import DRAFTER, files_of, record
from tests.tiny import prompt_ids


@pytest.fixture
def copy(staged: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(staged, tmp_path / "copy"))


def test_a_staged_folder_is_complete(staged: Path) -> None:
    report = inspect_staged(staged).raise_if_refused()
    assert report.dtypes == {"BF16"}
    expected = {"config.json", "model.safetensors", "README.md", "card_record.json", CHECKSUMS, GENERATE, *CODE_FILES}
    assert set(report.files) == expected
    assert {"modeling_domino.py", "configuration_domino.py", "integration_domino.py"} <= set(CODE_FILES)
    config = json.loads((staged / "config.json").read_text())
    assert config["auto_map"] == AUTO_MAP
    assert config["model_type"] == "domino"
    assert config["domino_config"]["target_name"] == "org/tiny-target"
    assert f'DRAFTER = "{DRAFTER}"' in (staged / GENERATE).read_text()
    assert report.parameters == sum(tensor.numel() for tensor in load_file(staged / "model.safetensors").values())


def test_staging_keeps_the_weights(staged: Path, checkpoint: Path) -> None:
    before, after = (load_file(folder / "model.safetensors") for folder in (checkpoint, staged))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_staging_rounds_to_bfloat16_and_makes_shards(checkpoint: Path, tmp_path: Path) -> None:
    DominoDraftModel.from_pretrained(checkpoint, dtype=torch.float32).save_pretrained(tmp_path / "float32")
    report = stage(tmp_path / "float32", tmp_path / "staged", record(), max_shard_size="20KB")
    assert report.dtypes == {"BF16"} and not report.problems
    assert sum(name.endswith(".safetensors") for name in report.files) > 1
    loaded = DominoDraftModel.from_pretrained(tmp_path / "staged")
    expected = DominoDraftModel.from_pretrained(checkpoint)
    assert all(torch.equal(a, b) for a, b in zip(loaded.parameters(), expected.parameters(), strict=True))


def test_staging_again_replaces_and_is_the_same(staged: Path, checkpoint: Path, tmp_path: Path) -> None:
    folder = tmp_path / "again"
    stage(checkpoint, folder, record(summary="An earlier one."))
    stage(checkpoint, folder, record())
    assert files_of(folder) == files_of(staged)


def test_staging_leaves_other_folders_alone(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(FileExistsError, match="not a staged repo"):
        stage(checkpoint, tmp_path, record())
    assert (tmp_path / "thesis.txt").exists()


def test_failed_staging_leaves_what_was_there(staged: Path, checkpoint: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(staged, tmp_path / "before"))
    broken = record()
    del broken["training"]["hardware"]
    with pytest.raises(ValueError, match="hardware"):
        stage(checkpoint, folder, broken)
    assert files_of(folder) == files_of(staged)
    assert [path.name for path in tmp_path.iterdir()] == ["before"]


def test_a_folder_with_weights_only_is_completed(staged: Path, tmp_path: Path) -> None:
    for name in ("config.json", "model.safetensors"):
        shutil.copyfile(staged / name, tmp_path / name)
    (tmp_path / "old_domino.py").write_text("# of an earlier version")
    complete(tmp_path, record())
    assert files_of(tmp_path) == files_of(staged)


def test_a_staged_drafter_drafts(staged: Path, target) -> None:
    trial = try_drafter(staged, target, prompt_ids(8))
    assert trial.identical
    assert trial.rounds >= 1
    assert trial.acceptance_length > 1


def test_a_draft_vocabulary_is_no_other_dtype(checkpoint: Path, tmp_path: Path) -> None:
    drafter = DominoDraftModel.from_pretrained(checkpoint)
    drafter.restrict_vocabulary(torch.arange(3, 43))
    drafter.save_pretrained(tmp_path / "restricted")
    report = stage(tmp_path / "restricted", tmp_path / "staged", record())
    assert report.dtypes == {"BF16"} and not report.problems
    assert "| Vocabulary | 61, of which 40 are drafted |" in (tmp_path / "staged/README.md").read_text()


def test_a_changed_byte_is_found(copy: Path) -> None:
    path = copy / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    assert inspect_staged(copy).problems == [f"model.safetensors differs from its checksum in {CHECKSUMS}."]


@pytest.mark.parametrize(
    "name",
    [
        "optimizer.pt",
        "pytorch_model.bin",
        "trainer_state.json",
        "sub/config.json",
        "setup.py",
        "custom_generate/requirements.txt",
        "model.safetensors.bak",
    ],
)
def test_strange_files_are_refused(copy: Path, name: str) -> None:
    (copy / name).parent.mkdir(exist_ok=True)
    (copy / name).write_bytes(b"anything")
    assert any(problem.startswith(f"{name} has no place there") for problem in inspect_folder(copy).problems)


def test_changed_code_is_refused(copy: Path) -> None:
    with (copy / "modeling_domino.py").open("a") as file:
        file.write("# one line more\n")
    problems = inspect_staged(copy).problems
    assert any("modeling_domino.py is not this version's" in problem for problem in problems)


def test_weights_of_the_target_are_refused(copy: Path) -> None:
    tensors = load_file(copy / "model.safetensors")
    tensors["embed_tokens.weight"] = torch.zeros(61, 32, dtype=torch.bfloat16)
    save_file(tensors, copy / "model.safetensors", metadata={"format": "pt"})
    assert any("Unexpected: embed_tokens.weight" in problem for problem in inspect_folder(copy).problems)


def test_other_dtypes_are_refused(copy: Path) -> None:
    tensors = {name: tensor.float() for name, tensor in load_file(copy / "model.safetensors").items()}
    save_file(tensors, copy / "model.safetensors", metadata={"format": "pt"})
    assert "Weights are F32; publish bfloat16 only." in inspect_staged(copy).problems


def test_links_are_refused(copy: Path, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("a key")
    (copy / "LICENSE").symlink_to(tmp_path / "secret")
    assert any(problem.startswith("LICENSE is a link") for problem in inspect_staged(copy).problems)


def test_an_unusable_repo_id_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="Repo id"):
        stage(checkpoint, tmp_path / "staged", record(repo_id="not a name"))
