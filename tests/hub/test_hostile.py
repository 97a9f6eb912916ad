"""Strangers' repos: refused without running anything of theirs and without much memory."""

import json
import os
import pickle
import resource
import shutil
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from hf_domino import DominoDraftModel
from hf_domino.hub import inspect_folder
from tests.hub.client_calls import fetched, load
from tests.hub.helpers import DRAFTER, Refused, files_of
from tests.hub.hub_server import HubServer

MEMORY_ALLOWED = 300 * 2**20


@pytest.fixture
def copy(staged: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(staged, tmp_path / "copy"))


@pytest.fixture
def little_memory():
    """An allocation far beyond what the process has now fails instead of succeeding."""
    with open("/proc/self/statm") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY_ALLOWED, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


def change_config(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    nested = config["dflash_config"]
    for key, value in changes.items():
        (nested if key in nested and key not in config else config)[key] = value
        if key in nested:
            nested[key] = value
    (folder / "config.json").write_text(json.dumps(config))


class Bomb:
    """Runs a command when it is unpickled."""

    def __init__(self, marker: Path):
        self.marker = marker

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.marker),)


def test_pickled_weights_are_not_opened(copy: Path, tmp_path: Path) -> None:
    marker = tmp_path / "ran"
    (copy / "model.safetensors").unlink()
    (copy / "pytorch_model.bin").write_bytes(pickle.dumps(Bomb(marker)))
    problems = inspect_folder(copy).problems
    assert any("pickles can run code" in problem for problem in problems)
    assert any("There are no weights" in problem for problem in problems)
    with pytest.raises(OSError, match=r"no file named model\.safetensors"):
        DominoDraftModel.from_pretrained(copy)
    assert not marker.exists()
    pickle.loads((copy / "pytorch_model.bin").read_bytes())
    assert marker.exists()  # the bomb was a real one


@pytest.mark.parametrize(
    "changes",
    [
        {"num_hidden_layers": 10**9},
        {"hidden_size": 10**9},
        {"vocab_size": 10**12},
        {"block_size": 10**9},
        {"emb_dim": 10**10},
        {"gru_hidden_dim": 10**9},
        {"intermediate_size": 10**12},
        {"num_attention_heads": 10**9},
    ],
)
def test_absurd_dimensions(copy: Path, changes: dict[str, int], little_memory) -> None:
    change_config(copy, **changes)
    problems = inspect_folder(copy).problems
    assert len(problems) == 1 and "No drafter has" in problems[0]
    with pytest.raises(ValueError, match="No drafter has"):
        DominoDraftModel.from_pretrained(copy)


@pytest.mark.parametrize(
    "changes",
    [
        {"hidden_size": 2**17},
        {"vocab_size": 2**22, "emb_dim": 2**12},
        {"num_hidden_layers": 250, "layer_types": None},
    ],
)
def test_large_dimensions_that_the_weights_do_not_have(copy: Path, changes: dict[str, Any], little_memory) -> None:
    """Within what a configuration may say, and still no memory is taken for it."""
    change_config(copy, **changes)
    problems = inspect_folder(copy).problems
    assert len(problems) == 1 and "tensors are not those of its configuration" in problems[0]
    with pytest.raises(ValueError, match="tensors are not those of its configuration"):
        DominoDraftModel.from_pretrained(copy)


def header_of(path: Path) -> tuple[dict[str, Any], bytes]:
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def write_with_header(path: Path, header: dict[str, Any], rest: bytes) -> None:
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + rest)


def lie_about_header_length(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(struct.pack("<Q", 2**60) + data[8:])


def lie_about_shape(path: Path) -> None:
    header, rest = header_of(path)
    header["norm.weight"]["shape"] = [10**13]
    write_with_header(path, header, rest)


def lie_about_offsets(path: Path) -> None:
    header, rest = header_of(path)
    header["norm.weight"]["data_offsets"] = [0, 10**14]
    write_with_header(path, header, rest)


def overlap_tensors(path: Path) -> None:
    header, rest = header_of(path)
    header["norm.weight"]["data_offsets"] = header["hidden_norm.weight"]["data_offsets"]
    write_with_header(path, header, rest)


def cut_off(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1000])


def empty(path: Path) -> None:
    path.write_bytes(b"")


@pytest.mark.parametrize(
    "damage", [lie_about_header_length, lie_about_shape, lie_about_offsets, overlap_tensors, cut_off, empty]
)
def test_headers_that_lie(copy: Path, damage, little_memory) -> None:
    damage(copy / "model.safetensors")
    problems = inspect_folder(copy).problems
    assert len(problems) == 1 and "is damaged" in problems[0]
    with pytest.raises(ValueError, match=r"is damaged.*force_download=True"):
        DominoDraftModel.from_pretrained(copy)


@pytest.mark.parametrize("text", ["", "[]", "{", "[" * 100_000, '{"model_type": "domino"}', "\x00\xff", "null"])
def test_broken_configurations(copy: Path, text: str) -> None:
    (copy / "config.json").write_bytes(text.encode("latin-1"))
    assert inspect_folder(copy).problems


def test_huge_texts(copy: Path) -> None:
    with (copy / "config.json").open("ab") as file:
        file.truncate(2**33)  # sparse
    assert any("config.json has" in problem for problem in inspect_folder(copy).problems)


def test_shards_elsewhere(copy: Path) -> None:
    index = {"metadata": {}, "weight_map": {"norm.weight": "../../secret.safetensors"}}
    (copy / "model.safetensors.index.json").write_text(json.dumps(index))
    assert any("secret" in problem for problem in inspect_folder(copy).problems)


def test_integer_weights(copy: Path) -> None:
    tensors = {name: tensor.to(torch.int8) for name, tensor in load_file(copy / "model.safetensors").items()}
    save_file(tensors, copy / "model.safetensors", metadata={"format": "pt"})
    assert any("Weights are I8" in problem for problem in inspect_folder(copy).problems)


def spring_traps(files: dict[str, bytes], marker: Path) -> dict[str, bytes]:
    """The repo's own files, each of whose Python files would leave a mark if it ran."""
    trap = f"import os\nos.makedirs({str(marker)!r}, exist_ok=True)\n".encode()
    return {name: trap + content if name.endswith(".py") else content for name, content in files.items()}


def test_the_package_never_runs_a_repo_s_code(client, hub: HubServer, staged: Path, tmp_path: Path) -> None:
    marker = tmp_path / "ran"
    hub.add_repo("org/trapped", spring_traps(files_of(staged), marker))
    assert client(load, "org/trapped") == client(load, DRAFTER)
    assert not any(name.endswith(".py") for name in client(fetched, "org/trapped"))
    assert not any(request.endswith(".py") for request in hub.requests)
    assert not marker.exists()


def test_code_of_another_repo(client, hub: HubServer, staged: Path) -> None:
    files = files_of(staged)
    files.pop("SHA256SUMS")
    config = json.loads(files["config.json"])
    config["auto_map"] = {"AutoConfig": "evil/repo--configuration_domino.DominoConfig"}
    files["config.json"] = json.dumps(config).encode()
    hub.add_repo("org/borrowed", files)
    with pytest.raises(Refused, match="auto_map names code that is not this project's"):
        client(fetched, "org/borrowed")
    assert not any("evil" in request for request in hub.requests)


@pytest.mark.parametrize("name", ["evil.py", "pytorch_model.bin", "optimizer.pt", "custom_generate/requirements.txt"])
def test_strange_files_are_not_downloaded(client, hub: HubServer, staged: Path, name: str) -> None:
    hub.add_repo("org/strange", files_of(staged) | {name: b"x"})
    with pytest.raises(Refused, match=name):
        client(fetched, "org/strange")
    assert not any("/resolve/" in request for request in hub.requests)


def test_a_repo_too_large_is_not_downloaded(client, hub: HubServer, staged: Path, monkeypatch) -> None:
    from tests.hub.hub_server import _Handler

    true = _Handler._entry
    monkeypatch.setattr(_Handler, "_entry", lambda self, *args: true(self, *args) | {"size": 2**40})
    with pytest.raises(Refused, match="more than any drafter"):
        client(fetched, DRAFTER)
    assert not any("/resolve/" in request for request in hub.requests)
