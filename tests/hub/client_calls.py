"""Calls that tests make in the client process: it imports this module by its name."""

from pathlib import Path

from huggingface_hub.constants import HF_HUB_CACHE

from hf_domino import DominoDraftModel
from hf_domino.hub import fetch_drafter, plan_push, push
from hf_domino.hub.checksums import sha256
from tests.hub.helpers import files_of


def publish(folder: Path, repo_id: str, token: str | None = None, private: bool | None = None) -> str:
    return push(plan_push(folder, repo_id, token), token, private)


def planned(folder: Path, repo_id: str) -> tuple[list[str], str | None, str]:
    plan = plan_push(folder, repo_id)
    return plan.deletions, plan.parent, str(plan)


def fetched(repo_id: str, revision: str | None = None, token: str | None = None) -> dict[str, bytes]:
    return files_of(fetch_drafter(repo_id, revision, token))


def load(repo_id: str, folder: str = "", revision: str = "main", token: str | bool | None = None) -> float:
    """Sum over the loaded weights."""
    drafter = DominoDraftModel.from_pretrained(repo_id, subfolder=folder, revision=revision, token=token)
    return sum(parameter.double().abs().sum().item() for parameter in drafter.parameters())


def push_plainly(folder: Path, repo_id: str) -> None:
    """As for any model: `push_to_hub`."""
    DominoDraftModel.from_pretrained(folder).push_to_hub(repo_id)


def cached_weights(repo_id: str) -> list[str]:
    """Checksums of the cached blobs and names in the snapshots."""
    folder = Path(HF_HUB_CACHE, "models--" + repo_id.replace("/", "--"))
    return [path.name for path in folder.rglob("*.safetensors")] + [
        path.name for path in (folder / "blobs").iterdir() if len(path.name) == 64 and sha256(path) != path.name
    ]
