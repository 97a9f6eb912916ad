"""What goes wrong on the way: each fault ends in success or in a clear error, with nothing half-published."""

from pathlib import Path

import pytest

from tests.hub.client_calls import cached_weights, fetched, load, publish
from tests.hub.helpers import NEW, Refused, files_of
from tests.hub.hub_server import HubServer

WEIGHTS = r"resolve/.*/model\.safetensors"


@pytest.fixture
def published(hub: HubServer, new: Path, request: pytest.FixtureRequest) -> str:
    """A repo under a name of this test's own, so that no cache knows it."""
    repo_id = f"org/{request.node.name.translate({ord(c): '-' for c in '[]_'}).strip('-')}"
    hub.add_repo(repo_id, files_of(new))
    return repo_id


@pytest.mark.parametrize("pattern", [r"PUT /lfs/", r"POST .*/preupload/", r"POST .*/commit/", r"POST .*/batch$"])
@pytest.mark.parametrize("kind", ["drop", "status"])
def test_upload_goes_through_after_a_fault(client, hub: HubServer, new: Path, pattern: str, kind: str) -> None:
    fault = hub.fail(pattern, kind)
    client(publish, new, NEW)
    assert fault.seen == 1
    assert len(hub.repos[NEW].commits) == 2
    assert files_of(new).items() <= hub.repos[NEW].head.files.items()


@pytest.mark.parametrize("status", [429, 502])
def test_busy_servers_are_waited_for(client, hub: HubServer, new: Path, status: int) -> None:
    fault = hub.fail(r"POST .*/commit/", "status", status=status, headers={"Retry-After": "0"})
    client(publish, new, NEW)
    assert fault.seen == 1 and len(hub.repos[NEW].commits) == 2


def test_a_lost_answer_does_not_commit_twice(client, hub: HubServer, new: Path) -> None:
    old = hub.add_repo(NEW, {"old_domino.py": b"# old"})
    hub.fail(r"POST .*/commit/", "lose_answer")
    client(publish, new, NEW)
    assert len(old.commits) == 3
    assert "old_domino.py" not in old.head.files


def test_an_upload_that_keeps_failing_leaves_no_repo(client, hub: HubServer, new: Path) -> None:
    hub.fail(r"POST .*/commit/", "status", times=99, status=500)
    with pytest.raises(Refused, match=r"(?s)failed 3 times.*run the same command again") as error:
        client(publish, new, NEW)
    assert "ConnectionError" in error.value.kinds
    assert NEW not in hub.repos
    hub.faults.clear()
    client(publish, new, NEW)
    assert files_of(new).items() <= hub.repos[NEW].head.files.items()


def test_an_upload_that_keeps_failing_leaves_an_old_repo_as_it_was(client, hub: HubServer, new: Path) -> None:
    repo = hub.add_repo(NEW, {"README.md": b"before"})
    hub.fail(r"POST .*/commit/", "drop", times=99)
    with pytest.raises(Refused, match="Nothing was published"):
        client(publish, new, NEW)
    assert repo.head.files == {"README.md": b"before"}
    assert len(repo.commits) == 2


def test_corrupted_uploads_are_not_committed(client, hub: HubServer, new: Path) -> None:
    fault = hub.fail(r"PUT /lfs/", "corrupt")
    client(publish, new, NEW)
    assert fault.seen == 1
    assert hub.repos[NEW].head.files["model.safetensors"] == (new / "model.safetensors").read_bytes()


def test_someone_else_s_commit_is_not_overwritten(client, hub: HubServer, new: Path) -> None:
    repo = hub.add_repo(NEW, {"README.md": b"before"})

    class Rival(list):
        def append(self, request: str) -> None:
            if "/preupload/" in request and len(repo.commits) == 2:
                repo.commit({"README.md": b"the rival's"})
            super().append(request)

    requests, hub.requests = hub.requests, Rival()
    with pytest.raises(Refused, match="412"):
        client(publish, new, NEW)
    hub.requests = requests
    assert repo.head.files == {"README.md": b"the rival's"}


def test_a_read_only_token_publishes_nothing(client, hub: HubServer, new: Path) -> None:
    with pytest.raises(Refused, match="403 Forbidden"):
        client(publish, new, NEW, "hf_reader")
    assert NEW not in hub.repos
    repo = hub.add_repo(NEW, {"README.md": b"before"})
    with pytest.raises(Refused, match="403 Forbidden"):
        client(publish, new, NEW, "hf_reader")
    assert len(repo.commits) == 2 and hub.blobs == {}


def test_no_token(client, hub: HubServer, new: Path) -> None:
    with pytest.raises(Refused, match="401"):
        client(publish, new, NEW, "hf_unknown")
    assert NEW not in hub.repos


@pytest.mark.parametrize("kind", ["drop", "status"])
@pytest.mark.parametrize("use", [load, fetched])
def test_download_goes_through_after_a_fault(client, hub: HubServer, published: str, kind: str, use) -> None:
    fault = hub.fail(f"GET .*{WEIGHTS}", kind, status=429, after=5000)
    assert client(use, published)
    assert fault.seen == 1


def test_a_truncated_file_is_an_error_and_no_broken_cache(client, hub: HubServer, published: str) -> None:
    hub.fail(f"GET .*{WEIGHTS}", "truncate", times=1, after=5000)
    with pytest.raises(Refused, match="Consistency check failed"):
        client(load, published)
    assert client(load, published) > 0


def test_servers_that_stay_down_are_reported(client, hub: HubServer, published: str) -> None:
    hub.fail(rf"GET .*{WEIGHTS}", "status", times=99, status=500)
    with pytest.raises(Refused, match="500"):
        client(load, published)
    hub.faults.clear()
    assert client(load, published) > 0


def test_a_wrong_checksum_is_downloaded_again(client, hub: HubServer, published: str, new: Path) -> None:
    fault = hub.fail(f"GET .*{WEIGHTS}", "corrupt")
    files = client(fetched, published)
    assert fault.seen == 1
    assert files["model.safetensors"] == (new / "model.safetensors").read_bytes()


def test_a_checksum_that_stays_wrong_is_refused(client, hub: HubServer, published: str) -> None:
    hub.fail(f"GET .*{WEIGHTS}", "corrupt", times=99)
    with pytest.raises(Refused, match=r"model\.safetensors differ from their checksums, twice over"):
        client(fetched, published)
    assert client(cached_weights, published) == []
    hub.faults.clear()
    assert client(fetched, published)


def test_a_repo_that_contradicts_its_own_checksums_is_refused(client, hub: HubServer, new: Path) -> None:
    files = files_of(new)
    files["config.json"] = files["config.json"].replace(b'"block_size": 6', b'"block_size": 5')
    hub.add_repo("org/tampered", files)
    with pytest.raises(Refused, match=r"config\.json differ from their checksums"):
        client(fetched, "org/tampered")
