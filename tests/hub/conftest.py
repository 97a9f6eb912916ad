"""A local Hub, a client process that talks to it, and a small pair to publish."""

import multiprocessing
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from hf_domino.hub import stage
from tests.hub.helpers import (
    DRAFTER,
    NEW,
    ROOT,
    TARGET,
    call_and_report,
    files_of,
    hub_environment,
    record,
    tiny_tokenizer,
)
from tests.hub.hub_server import HubServer
from tests.tiny import skilled_drafter, tiny_target


@pytest.fixture(scope="session")
def target() -> PreTrainedModel:
    """In bfloat16's grid, so that a drafter published in bfloat16 fits it as well."""
    return tiny_target("qwen3", context=0.15)


@pytest.fixture(scope="session")
def target_folder(target: PreTrainedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("target") / "tiny-target"
    target.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def checkpoint(target: PreTrainedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint") / "drafter"
    skilled_drafter(target).to(torch.bfloat16).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def staged(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A complete staged repo. Copy it before changing it."""
    folder = tmp_path_factory.mktemp("staged") / "tiny-target-Domino"
    stage(checkpoint, folder, record())
    return folder


@pytest.fixture(scope="session")
def new(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A staged repo that the server does not have."""
    folder = tmp_path_factory.mktemp("new") / "new-Domino"
    stage(checkpoint, folder, record(NEW))
    return folder


@pytest.fixture(scope="session")
def running_hub() -> Iterator[HubServer]:
    with HubServer() as server:
        yield server


@pytest.fixture
def hub(running_hub: HubServer, staged: Path, target_folder: Path) -> HubServer:
    """The server with the pair on it, no faults."""
    running_hub.repos.clear()
    running_hub.blobs.clear()
    running_hub.faults.clear()
    running_hub.requests.clear()
    running_hub.add_repo(TARGET, files_of(target_folder))
    running_hub.add_repo(DRAFTER, files_of(staged))
    return running_hub


@pytest.fixture(scope="session")
def _client_process(running_hub: HubServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProcessPoolExecutor]:
    """A process that was started with HF_ENDPOINT set, as a user's is: the client reads it once, on import."""
    environment = hub_environment(running_hub.url, tmp_path_factory.mktemp("home"), HF_TOKEN="hf_writer")
    before = dict(os.environ)
    os.environ.clear()
    os.environ.update(environment)
    try:
        pool = ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn"))
        pool.submit(os.getpid).result()
    finally:
        os.environ.clear()
        os.environ.update(before)
    with pool:
        yield pool


@pytest.fixture
def client(hub: HubServer, _client_process: ProcessPoolExecutor) -> Callable[..., Any]:
    """`client(function, *arguments)`: the call, made in the client process."""
    return lambda function, *arguments: _client_process.submit(call_and_report, function, arguments).result()


@pytest.fixture
def fresh_python(hub: HubServer, tmp_path: Path) -> Callable[..., str]:
    """`fresh_python(code)`: output of a new Python process away from the checkout, `package=True`: with it."""

    def run(code: str, package: bool = False, **environment: str) -> str:
        variables = hub_environment(hub.url, tmp_path / "home", **environment)
        if package:
            variables["PYTHONPATH"] = str(ROOT)
        result = subprocess.run(
            [sys.executable, "-c", code], cwd=tmp_path, env=variables, capture_output=True, text=True, timeout=120
        )
        assert result.returncode == 0, result.stderr[-3000:]
        return result.stdout

    return run
