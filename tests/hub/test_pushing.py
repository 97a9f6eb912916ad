"""Pushing and loading through the real client, against the local Hub."""

from pathlib import Path

import pytest

from hf_domino.hub import stage
from tests.hub.client_calls import fetched, load, planned, publish, push_plainly
from tests.hub.helpers import DRAFTER, NEW, Refused, files_of, record
from tests.hub.hub_server import HubServer


def test_a_new_repo_gets_everything_in_one_commit(client, hub: HubServer, new: Path) -> None:
    url = client(publish, new, NEW)
    repo = hub.repos[NEW]
    assert len(repo.commits) == 2  # the Hub's own first one, and ours
    assert url.endswith(repo.head.sha)
    published = dict(repo.head.files)
    published.pop(".gitattributes")
    assert published == files_of(new)
    assert not repo.private


def test_private_repos(client, hub: HubServer, new: Path) -> None:
    client(publish, new, NEW, None, True)
    assert hub.repos[NEW].private
    hub.add_repo("org/private", files_of(new), private=True)  # a name that no cache knows
    with pytest.raises(Refused, match="is not a local folder and is not a valid model identifier") as error:
        client(load, "org/private", "", "main", False)
    assert "OSError" in error.value.kinds
    assert client(load, "org/private", "", "main", "hf_reader") > 0


def test_pushing_the_same_again_makes_no_commit(client, hub: HubServer, new: Path) -> None:
    client(publish, new, NEW)
    hub.requests.clear()
    client(publish, new, NEW)
    assert len(hub.repos[NEW].commits) == 2
    assert not any(request.startswith("PUT") for request in hub.requests)


def test_old_shards_and_code_go_and_other_files_stay(client, hub: HubServer, new: Path) -> None:
    old = {"model-00001-of-00002.safetensors": b"old", "old_domino.py": b"# old", "notes.md": b"the owner's"}
    hub.add_repo(NEW, old)
    deletions, parent, text = client(planned, new, NEW)
    assert deletions == ["model-00001-of-00002.safetensors", "old_domino.py"]
    assert parent == hub.repos[NEW].head.sha
    assert "  - old_domino.py" in text and "+ model.safetensors" in text
    client(publish, new, NEW)
    files = hub.repos[NEW].head.files
    assert files["notes.md"] == b"the owner's"
    assert not set(deletions) & set(files)
    assert len(hub.repos[NEW].commits) == 3


def test_planning_writes_nothing(client, hub: HubServer, new: Path) -> None:
    client(planned, new, NEW)
    assert NEW not in hub.repos
    assert not any(request.startswith(("POST", "PUT", "DELETE")) for request in hub.requests)


def test_a_folder_staged_for_another_repo_is_not_pushed(client, hub: HubServer, new: Path) -> None:
    with pytest.raises(Refused, match="staged for another repo"):
        client(publish, new, "org/elsewhere")
    assert hub.requests == []


def test_plain_push_to_hub_and_load(client, hub: HubServer, checkpoint: Path) -> None:
    client(push_plainly, checkpoint, "org/plain")
    assert client(load, "org/plain") == client(load, str(checkpoint))


def test_revision_and_subfolder(client, hub: HubServer, staged: Path) -> None:
    files = files_of(staged)
    repo = hub.add_repo("org/versions", {f"drafters/small/{name}": content for name, content in files.items()})
    repo.branches["v1"] = repo.head.sha
    repo.commit({"README.md": b"moved away"})
    assert client(load, "org/versions", "drafters/small", "v1") == client(load, DRAFTER)
    with pytest.raises(Refused, match="does not appear to have a file named"):
        client(load, "org/versions", "drafters/small")
    with pytest.raises(Refused, match="not a valid git identifier"):
        client(load, "org/versions", "", "v2")


def test_gated_repos(client, hub: HubServer, staged: Path) -> None:
    hub.add_repo("org/gated", files_of(staged), gated=True)
    with pytest.raises(Refused, match="gated repo"):
        client(load, "org/gated", "", "main", False)
    assert client(load, "org/gated", "", "main", "hf_reader") == client(load, DRAFTER)


def test_sharded_drafters(client, hub: HubServer, checkpoint: Path, tmp_path: Path) -> None:
    stage(checkpoint, tmp_path / "shards", record("org/shards"), max_shard_size="20KB")
    client(publish, tmp_path / "shards", "org/shards")
    assert sum(name.endswith(".safetensors") for name in hub.repos["org/shards"].head.files) > 1
    assert client(load, "org/shards") == client(load, DRAFTER)


def test_fetching_takes_no_code(client, staged: Path) -> None:
    files = client(fetched, DRAFTER)
    assert files == {name: content for name, content in files_of(staged).items() if not name.endswith(".py")}
