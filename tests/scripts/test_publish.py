"""The publishing command, as it is run."""

import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from scripts.publish import main
from tests.hub.helpers import ROOT, hub_environment, raw_benchmark, record, tiny_tokenizer
from tests.hub.hub_server import HubServer
from tests.tiny import skilled_drafter, tiny_target


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `target` and `drafter`."""
    folder = tmp_path_factory.mktemp("pair")
    target = tiny_target("qwen3", context=0.15)
    target.save_pretrained(folder / "target")
    tiny_tokenizer().save_pretrained(folder / "target")
    skilled_drafter(target).to(torch.bfloat16).save_pretrained(folder / "drafter")
    return folder


@pytest.fixture
def record_file(tmp_path: Path) -> Path:
    path = tmp_path / "record.json"
    path.write_text(json.dumps(record(results=[])))
    return path


@pytest.fixture
def hub_and_command(tmp_path: Path) -> Iterator[tuple[HubServer, Callable[[list[str]], str]]]:
    """A Hub, and the command in a process of its own."""
    with HubServer() as hub:

        def run(arguments: list[str]) -> str:
            environment = hub_environment(hub.url, tmp_path / "home", HF_TOKEN="hf_writer", PYTHONPATH=str(ROOT))
            result = subprocess.run(
                [sys.executable, str(ROOT / "scripts/publish.py"), *arguments],
                cwd=tmp_path,
                env=environment,
                capture_output=True,
                text=True,
                timeout=180,
            )
            assert result.returncode == 0, result.stderr[-3000:]
            return result.stdout

        yield hub, run


def test_dry_run(pair: Path, record_file: Path, tmp_path: Path, capsys) -> None:
    (tmp_path / "benchmark.json").write_text(json.dumps(raw_benchmark(3.0)))
    main(
        [
            "--checkpoint",
            str(pair / "drafter"),
            "--record",
            str(record_file),
            "--folder",
            str(tmp_path / "staged"),
            "--benchmark",
            str(tmp_path / "benchmark.json"),
            "--target",
            str(pair / "target"),
            "--engines",
            str(tmp_path / "engines"),
        ]
    )
    out = capsys.readouterr().out
    assert re.search(r"\d+ rounds, \d\.\d\d tokens per forward, output identical \(torch\.float32\)", out)
    assert re.search(r"\+ model\.safetensors +[\d,]+ bytes", out)
    assert "Nothing was sent. Add --push to publish." in out
    card = (tmp_path / "staged/README.md").read_text()
    assert "| gsm8k | domino | 40.0 | 1.80x | 1.70 to 1.90 | 3.00 | 100% |" in card
    assert json.loads((tmp_path / "engines/config.json").read_text())["model_type"] == "qwen3"

    main(["--folder", str(tmp_path / "staged")])  # as it is
    assert "files, code, tensors and checksums are right" in capsys.readouterr().out

    (tmp_path / "staged/README.md").write_text("something else")
    with pytest.raises(ValueError, match=r"README\.md differs from its checksum"):
        main(["--folder", str(tmp_path / "staged")])
    main(["--folder", str(tmp_path / "staged"), "--record", str(record_file)])  # completed again
    assert "Not measured yet." in (tmp_path / "staged/README.md").read_text()


@pytest.mark.parametrize("arguments", [["--checkpoint", "x"], ["--benchmark", "x"], []])
def test_arguments_that_lack_something(arguments: list[str], tmp_path: Path, capsys) -> None:
    folder = ["--folder", str(tmp_path)] if arguments else []
    with pytest.raises(SystemExit) as error:
        main([*folder, *arguments])
    assert error.value.code == 2
    assert "usage" in capsys.readouterr().err


def test_a_target_that_does_not_fit(pair: Path, record_file: Path, tmp_path: Path) -> None:
    tiny_target("qwen3", hidden_size=16).save_pretrained(tmp_path / "other")
    tiny_tokenizer().save_pretrained(tmp_path / "other")
    with pytest.raises(ValueError, match="hidden size: the target has 16, the drafter was made for 32"):
        main(
            [
                "--checkpoint",
                str(pair / "drafter"),
                "--record",
                str(record_file),
                "--folder",
                str(tmp_path / "staged"),
                "--target",
                str(tmp_path / "other"),
            ]
        )


def test_push_goes_through_the_command(hub_and_command, pair: Path, record_file: Path, tmp_path: Path) -> None:
    hub, run = hub_and_command
    folder = str(tmp_path / "staged")
    out = run(["--checkpoint", str(pair / "drafter"), "--record", str(record_file), "--folder", folder, "--push"])
    repo = hub.repos["org/tiny-target-Domino"]
    assert repo.head.sha in out
    assert repo.head.files["model.safetensors"] == (tmp_path / "staged/model.safetensors").read_bytes()
    assert len(repo.commits) == 2
