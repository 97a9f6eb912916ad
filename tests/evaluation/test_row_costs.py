"""The price of rows: which forwards are timed, and the table of them."""

import json

from hf_domino.evaluation.draft_costs import draft_costs
from hf_domino.evaluation.row_costs import row_costs, table
from scripts import row_costs as script
from tests.tiny import tiny_target


def test_every_forward_sees_the_same_context(monkeypatch):
    target, seen = tiny_target(), []
    forward = target.forward

    def watched(ids, cache, **options):
        seen.append((*ids.shape, cache.get_seq_length()))
        return forward(ids, cache=cache, **options)

    monkeypatch.setattr(target, "forward", watched)
    costs = row_costs(target, [1, 3], [1, 4], context=20, repeats=2)

    prefills = [(1, 20, 0), (3, 20, 0)]
    assert [shape for shape in seen if shape in prefills] == prefills
    # Plain's step, one row and four, of each batch size: a warm-up and two that count.
    expected = [(batch, rows, 20) for batch in (1, 3) for _ in range(3) for rows in (1, 1, 4)]
    assert [shape for shape in seen if shape not in prefills] == expected
    assert [entry["batch_size"] for entry in costs] == [1, 3]
    assert all(entry["plain_milliseconds"] > 0 and list(entry["milliseconds"]) == ["1", "4"] for entry in costs)


def test_every_draft_is_verified_whole_behind_the_same_context(contenders, monkeypatch):
    target, drafter, seen = contenders.model, contenders.drafters[""], []
    forward = target.forward

    def watched(ids, cache, **options):
        seen.append((ids.shape[1], cache.get_seq_length()))
        return forward(ids, cache=cache, **options)

    monkeypatch.setattr(target, "forward", watched)
    costs = draft_costs(target, drafter, nodes=5, context=20, repeats=2)

    assert seen == [(20, 0), *[(6, 20)] * 4]
    assert costs["nodes"] == 5 and costs["depth"] == drafter.config.max_drafts
    assert costs["backbone_milliseconds"] > 0 and costs["verify_milliseconds"] > 0
    assert costs["draft_milliseconds"] > costs["backbone_milliseconds"]


def test_the_table_is_in_units_of_the_plain_step():
    costs = [{"batch_size": 2, "plain_milliseconds": 40.0, "milliseconds": {"1": 44.0, "8": 60.0}}]

    assert table(costs).splitlines() == [
        "| batch | plain step, ms | 1 row | 8 rows |",
        "| --- | --- | --- | --- |",
        "| 2 | 40 | 1.10 | 1.50 |",
    ]


def test_the_script_writes_a_record(contenders, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(script, "load_contenders", lambda options: contenders)
    output = tmp_path / "rows.json"

    script.main(["--output", str(output), "--batch-sizes", "1", "--rows", "2", "--context", "8", "--repeats", "1"])

    record = json.loads(output.read_text())
    assert record["context"] == 8 and record["drafts"][""]["nodes"] == 16
    assert record["environment"]["threads"] >= 1
    assert table(record["costs"]) in capsys.readouterr().out
