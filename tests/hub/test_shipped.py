"""The drafters that come with the project, as staged repos in hub_cards/."""

import json
from pathlib import Path

import pytest

from hf_domino.hub import drafter_card, inspect_staged
from tests.hub.helpers import ROOT

SHIPPED = sorted(path for path in (ROOT / "hub_cards").glob("*-Domino") if path.is_dir())


@pytest.mark.parametrize("folder", SHIPPED, ids=lambda folder: folder.name)
def test_a_shipped_repo_is_complete(folder: Path) -> None:
    """After a change of hf_domino/drafter/: scripts/publish.py --folder FOLDER --record FOLDER/card_record.json."""
    inspect_staged(folder).raise_if_refused()


@pytest.mark.parametrize("folder", SHIPPED, ids=lambda folder: folder.name)
def test_its_card_is_its_record_s(folder: Path) -> None:
    record = json.loads((folder / "card_record.json").read_text())
    config = json.loads((folder / "config.json").read_text())
    assert (folder / "README.md").read_text() == str(drafter_card(config, record))
    assert record["repo_id"].split("/")[-1] == folder.name
