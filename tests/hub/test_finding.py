"""Drafters for a target, found on the Hub."""

import json
import re
from pathlib import Path

import pytest

from hf_domino import DominoDraftModel
from hf_domino.drafter.finding_domino import best_drafter
from hf_domino.drafter.target_domino import fingerprint
from hf_domino.hub import drafter_card, find_drafters
from tests.hub.helpers import DRAFTER, TARGET, Refused, benchmark, files_of, record
from tests.hub.hub_server import HubServer
from tests.tiny import tiny_target


def names(target: str) -> list[tuple[str, float | None]]:
    return [(found.repo_id, found.acceptance_length) for found in find_drafters(target)]


def load_for_target(family: str, name: str | None, **overrides: int) -> str:
    """Name of the repo that is loaded."""
    target = tiny_target(family, **overrides)
    drafter = DominoDraftModel.for_target(target, target_name=name)
    return drafter.config._name_or_path


def best(name: str) -> str:
    target = tiny_target("qwen3", context=0.15)
    return best_drafter(target, name).repo_id


@pytest.fixture
def files(staged: Path) -> dict[str, bytes]:
    return files_of(staged)


def with_card(files: dict[str, bytes], **changes) -> dict[str, bytes]:
    card = drafter_card(json.loads(files["config.json"]), record(**changes))
    return files | {"README.md": str(card).encode()}


def test_newest_first_with_acceptance(client, hub: HubServer, files: dict[str, bytes]) -> None:
    hub.repos[DRAFTER].modified = hub.repos[DRAFTER].modified.replace(year=2020)
    hub.add_repo("org/newer", with_card(files, results=[benchmark(3.25)]), days_ago=1)
    hub.add_repo("org/newest", with_card(files, results=[]))
    untagged = re.sub(rb"- domino\n", b"", files["README.md"])
    hub.add_repo("org/untagged", files | {"README.md": untagged})
    other = {"name": "org/other", "revision": "main", "chat_template": "-", "thinking_mode": "-"}
    hub.add_repo("org/for-other", with_card(files, target=other))
    assert client(names, TARGET) == [("org/newest", None), ("org/newer", 3.25), (DRAFTER, 2.5)]
    assert client(names, "org/other") == [("org/for-other", 2.5)]
    assert client(names, "org/nothing") == []


def test_private_drafters_of_others_are_not_listed(client, hub: HubServer) -> None:
    hub.repos[DRAFTER].private = True
    hub.tokens.pop("hf_writer")
    try:
        assert client(names, TARGET) == []
    finally:
        hub.tokens["hf_writer"] = "write"


def test_strange_figures_are_passed_by(client, hub: HubServer, files: dict[str, bytes]) -> None:
    readme = files["README.md"].replace(b"value: 2.5", b"value: about four")
    assert readme != files["README.md"]
    hub.add_repo(DRAFTER, files | {"README.md": readme})
    assert client(names, TARGET) == [(DRAFTER, None)]


def test_the_best_that_fits_is_loaded(client, hub: HubServer, files: dict[str, bytes]) -> None:
    hub.add_repo("org/better", with_card(files, results=[benchmark(4.0)]), days_ago=3)
    unfit = files["config.json"].replace(b'"num_target_layers": 4', b'"num_target_layers": 5')
    assert unfit != files["config.json"]
    hub.add_repo("org/boasts", with_card(files, results=[benchmark(99.0)]) | {"config.json": unfit})
    nonsense = files["config.json"].replace(b'"block_size": 6', b'"block_size": "six"')
    hub.add_repo("org/nonsense", with_card(files, results=[benchmark(50.0)]) | {"config.json": nonsense})
    hub.add_repo("org/broken", with_card(files, results=[benchmark(40.0)]) | {"config.json": b"[" * 99})
    assert client(best, TARGET) == "org/better"
    assert client(load_for_target, "qwen3", TARGET) == "org/better"


def test_there_is_none(client, hub: HubServer) -> None:
    with pytest.raises(Refused, match=r"There is no drafter for org/lonely on the Hub.*domino") as error:
        client(load_for_target, "qwen3", "org/lonely")
    assert "LookupError" in error.value.kinds


def test_none_fits(client, hub: HubServer) -> None:
    with pytest.raises(Refused, match="None of the drafters .* hidden size: the target has 16") as error:
        client(narrow, TARGET)
    assert "LookupError" in error.value.kinds


def test_a_drafter_for_a_model_of_the_same_shape_is_passed_by(client, hub: HubServer, files: dict[str, bytes]) -> None:
    config = json.loads(files["config.json"])
    own = fingerprint(tiny_target("qwen3", context=0.15).get_input_embeddings().weight)
    for repo_id, expected, tau in (("org/kin", own, 3.0), ("org/stranger", [9.0] * len(own), 4.0)):
        config["domino_config"]["target_fingerprint"] = expected
        changed = {"config.json": json.dumps(config).encode()}
        hub.add_repo(repo_id, with_card(files, results=[benchmark(tau)]) | changed)
    assert client(best, TARGET) == "org/kin"


def narrow(name: str) -> str:
    return load_for_target("qwen3", name, hidden_size=16)


def test_a_target_without_a_name(client, hub: HubServer) -> None:
    with pytest.raises(Refused, match="no Hub id; pass target_name"):
        client(load_for_target, "qwen3", None)


def test_the_hub_s_own_errors_are_passed_on(client, hub: HubServer) -> None:
    hub.fail("GET /api/models$", "status", times=9, status=403)
    with pytest.raises(Refused, match="403") as error:
        client(names, TARGET)
    assert "HfHubHTTPError" in error.value.kinds
