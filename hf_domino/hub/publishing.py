"""Pushes a staged folder to the Hub as one commit: all of it, or nothing."""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi
from huggingface_hub.errors import HfHubHTTPError, RepositoryNotFoundError

from . import layout
from .checks import inspect_staged

_ATTEMPTS = 3
_SECONDS_BETWEEN = 1.0


@dataclass(frozen=True)
class Push:
    """What a push would do.

    additions: bytes of each file, by its path in the repo. deletions: files of an earlier version that go.
    parent: the commit it builds on, or `None` where the repo does not exist yet.
    """

    folder: Path
    repo_id: str
    additions: dict[str, int]
    deletions: list[str]
    parent: str | None

    def __str__(self) -> str:
        total = sum(self.additions.values())
        lines = [f"{self.repo_id}: {'a new repo' if self.parent is None else f'on top of {self.parent[:12]}'}"]
        lines += [f"  + {name}  {size:,} bytes" for name, size in self.additions.items()]
        lines += [f"  - {name}" for name in self.deletions]
        return "\n".join([*lines, f"  {len(self.additions)} files, {total:,} bytes in all"])


def plan_push(folder: str | Path, repo_id: str, token: str | bool | None = None, compare: bool = True) -> Push:
    """What `push` would do with a staged folder. Nothing is written.

    Args:
        compare: ask the Hub what is there; else a new repo is assumed.

    Raises:
        ValueError: the folder is not a complete staged repo, or was staged for another repo id.
    """
    report = inspect_staged(folder).raise_if_refused()
    generate = (report.folder / layout.GENERATE).read_text(encoding="utf-8")
    if f'"{repo_id}"' not in generate:
        raise ValueError(f"{folder} was staged for another repo than {repo_id}: stage it again with that repo_id.")
    parent, deletions = None, []
    if compare:
        try:
            info = HfApi(token=token).model_info(repo_id)
        except RepositoryNotFoundError:
            pass
        else:
            parent = info.sha
            there = [sibling.rfilename for sibling in info.siblings or ()]
            # Shards and code of an earlier version; whatever else the owner keeps there stays.
            deletions = [name for name in there if name not in report.files and _ours(name)]
    return Push(report.folder, repo_id, report.files, sorted(deletions), parent)


def push(
    plan: Push, token: str | bool | None = None, private: bool | None = None, message: str = "Publish Domino drafter"
) -> str:
    """Makes the commit of a plan. Returns its URL.

    Files go up first, under no name; the commit that names them is one request. So the remote is as it was until that
    succeeds. Trying again is safe: what is up already is not sent twice, and a commit whose answer was lost is found.

    Raises:
        huggingface_hub.errors.HfHubHTTPError: the Hub refuses: no such token, no right to write, a bad card.
        ConnectionError: it failed several times; the remote is as it was.
    """
    api = HfApi(token=token)
    created = plan.parent is None
    if created:
        api.create_repo(plan.repo_id, private=private)
    try:
        return _commit(api, plan, message)
    except BaseException:
        if created:
            _remove_if_empty(api, plan.repo_id)
        raise


def _commit(api: HfApi, plan: Push, message: str) -> str:
    parent = plan.parent
    for attempt in range(1, _ATTEMPTS + 1):
        try:
            head = api.model_info(plan.repo_id).sha
            parent = parent or head
            operations: list[Any] = [CommitOperationAdd(name, str(plan.folder / name)) for name in plan.additions]
            # Another head at a second attempt is this commit, its answer lost: the client finds nothing to add.
            # Were it somebody else's, the Hub would refuse a commit with the old parent.
            if head == parent:
                operations += [CommitOperationDelete(name) for name in plan.deletions]
            return api.create_commit(plan.repo_id, operations, commit_message=message, parent_commit=parent).commit_url
        # The transport's own exceptions come from a library that changes with the version of huggingface_hub.
        except Exception as error:
            status = error.response.status_code if isinstance(error, HfHubHTTPError) else None
            if isinstance(error, ValueError) or (status is not None and status < 500 and status not in (408, 429)):
                raise
            if attempt == _ATTEMPTS:
                raise ConnectionError(
                    f"Pushing to {plan.repo_id} failed {attempt} times, lastly with: {error}. Nothing was published; "
                    "run the same command again."
                ) from error
            time.sleep(_SECONDS_BETWEEN)
    raise AssertionError("the loop above returns or raises")


def _ours(name: str) -> bool:
    return layout.is_code(name) or name == layout.INDEX or layout.WEIGHTS.fullmatch(name) is not None


def _remove_if_empty(api: HfApi, repo_id: str) -> None:
    """Takes back a repo that was created for a push that then failed."""
    try:
        if {sibling.rfilename for sibling in api.model_info(repo_id).siblings or ()} <= {".gitattributes"}:
            api.delete_repo(repo_id, missing_ok=True)
    except Exception:  # the error of the push is the one to report
        return
