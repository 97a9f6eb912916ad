"""Staging a PEFT adapter of a drafter."""

import json
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model

from hf_domino import DominoDraftModel
from hf_domino.hub import inspect_staged_adapter, stage_adapter
from scripts import publish
from tests.hub.helpers import DRAFTER, adapter_record
from tests.tiny import tiny_drafter, tiny_target


@pytest.fixture
def trained(tmp_path: Path) -> Path:
    """An adapter's folder, as PEFT leaves it; its base is the folder beside it."""
    tiny_drafter(tiny_target()).save_pretrained(tmp_path / "drafter")
    drafter = DominoDraftModel.from_pretrained(tmp_path / "drafter")
    config = LoraConfig(r=2, target_modules=["q_proj", "fc"], init_lora_weights=False)
    get_peft_model(drafter, config).save_pretrained(tmp_path / "adapter")
    return tmp_path / "adapter"


def test_a_staged_adapter_is_the_trained_one(trained: Path, tmp_path: Path) -> None:
    stage_adapter(trained, tmp_path / "staged", adapter_record())
    files = stage_adapter(trained, tmp_path / "staged", adapter_record())  # again: replaced
    assert set(files) == {
        "README.md",
        "SHA256SUMS",
        "adapter_config.json",
        "adapter_model.safetensors",
        "card_record.json",
    }
    config = json.loads((tmp_path / "staged/adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == DRAFTER and config["revision"] is None
    assert "base_model: " + DRAFTER in (tmp_path / "staged/README.md").read_text()
    both = [
        PeftModel.from_pretrained(DominoDraftModel.from_pretrained(tmp_path / "drafter"), folder).merge_and_unload()
        for folder in (trained, tmp_path / "staged")
    ]
    ours, theirs = (model.state_dict() for model in both)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_what_is_refused(trained: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no PEFT adapter"):
        stage_adapter(tmp_path / "drafter", tmp_path / "staged", adapter_record())
    with pytest.raises(FileExistsError, match="not a staged repo"):
        stage_adapter(trained, trained, adapter_record())
    stage_adapter(trained, tmp_path / "staged", adapter_record())
    weights = tmp_path / "staged/adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-4])
    (tmp_path / "staged/optimizer.pt").write_bytes(b"x")
    with pytest.raises(ValueError) as caught:
        inspect_staged_adapter(tmp_path / "staged")
    for part in ("optimizer.pt has no place", "is damaged", "differs from its checksum"):
        assert part in str(caught.value)


def test_the_command(trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    (tmp_path / "record.json").write_text(json.dumps(adapter_record()))
    common = ["--adapter", str(trained), "--folder", str(tmp_path / "staged")]
    publish.main([*common, "--record", str(tmp_path / "record.json")])
    assert f"hf upload org/tiny-lora {tmp_path / 'staged'} ." in capsys.readouterr().out
    with pytest.raises(SystemExit):
        publish.main(common)
