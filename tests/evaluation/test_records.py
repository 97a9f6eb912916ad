"""The tables in docs/benchmarks.md are those of the records in docs/records."""

import json
from pathlib import Path

from hf_domino.evaluation import row_costs

DOCS = Path(__file__).resolve().parents[2] / "docs"


def test_the_documented_table_of_row_costs_is_that_of_the_record():
    record = json.loads((DOCS / "records" / "row_costs.json").read_text(encoding="utf-8"))
    assert row_costs.table(record["costs"]) in (DOCS / "benchmarks.md").read_text(encoding="utf-8")
