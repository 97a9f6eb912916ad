"""The tables in docs/training.md are those of the records in docs/records."""

import json
from pathlib import Path

import pytest

from hf_domino.training import study, throughput

DOCS = Path(__file__).resolve().parents[2] / "docs"
TABLES = {
    "training_throughput": throughput.table,
    "training_objective": study.table,
    "training_curriculum": study.table,
}


@pytest.mark.parametrize("name", list(TABLES))
def test_the_documented_table_is_that_of_the_record(name):
    record = json.loads((DOCS / "records" / f"{name}.json").read_text(encoding="utf-8"))
    assert TABLES[name](record) in (DOCS / "training.md").read_text(encoding="utf-8")
