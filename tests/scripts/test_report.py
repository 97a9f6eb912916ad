"""The report from records alone."""

import json
import sys
from pathlib import Path

import pytest

from hf_domino.evaluation.report import sets_table, summary_table, write_report

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
import report as report_script  # noqa: E402


def figures(speedup, rounds=10, draft=1.0, quality=None):
    return {
        "tokens_per_second": 20 * speedup, "speedup": speedup, "speedup_ci95": [speedup - 0.1, speedup + 0.2],
        "acceptance_length": 1.5 * speedup,
        "acceptance_per_position": {"reached": [0.5, 0.2], "conditional": [0.5, 0.4]},
        "identical": 0.75, "seconds": 10.0, "draft_seconds": draft, "verify_seconds": None if draft is None else 6.0,
        "other_seconds": 3.0, "rounds": rounds, **({"quality": quality} if quality else {}),
    }  # fmt: skip


@pytest.fixture
def record():
    difference = {"unit": "3:abcd", "position": 17, "plain": 4, "ours": 5, "margin": 0.0625, "top2": True}
    return {
        "environment": {
            "processor": "P",
            "threads": 2,
            "device": "cpu",
            "dtype": "bfloat16",
            "torch": "2",
            "date": "2026-01-01T00:00",
            "transformers": "5",
            "hf_domino": "0",
        },
        "settings": {"temperature": 0.0, "max_new_tokens": 64, "batch_size": 1},
        "prompts": {"code": ["a", "b"], "prose": ["c"]},
        "cost_of_a_draft_round": {
            "domino": {"dispatches": 321, "launches": 210, "synchronisations": 1},
            "straightforward": None,
        },
        "methods": {
            "plain": {
                "overall": figures(1.0, rounds=0, draft=None),
                "sets": {label: figures(1.0) for label in ("code", "prose")},
            },
            "domino": {
                "overall": figures(1.83, quality={"exact_match": 0.125}),
                "sets": {"code": figures(2.04), "prose": figures(1.61)},
                "differences": [difference],
                "note": "a note",
            },
            "assisted": {"unavailable": "no small model"},
        },
    }


def test_tables_hold_the_records_numbers(record):
    assert "| domino | 36.6 | 1.83× (1.73–2.03) | 2.75 | 75.0% | 10% | 60% | 30% |" in summary_table(record)
    assert "| domino | 2.04× / 3.06 | 1.61× / 2.42 |" in sets_table(record)


def test_report_says_everything(record, tmp_path):
    text = write_report({"main": record}, tmp_path / "r").read_text()
    for part in (
        "code 2, prose 1",
        "greedy",
        "P, 2 threads",
        "bfloat16",
        "`assisted` was not measured: no small model",
        "`domino`: a note",
        "| domino | 3 | 17 | 0.062 | yes |",
        "12.5%",
        "| domino | 321 | 210 | 1 |",
    ):
        assert part in text
    assert {path.name for path in (tmp_path / "r").iterdir()} == {
        "report.md",
        "main-speedup.png",
        "main-acceptance.png",
        "main-time.png",
    }


def test_a_changed_number_changes_the_report(record, tmp_path):
    before = write_report({"main": record}, tmp_path).read_text()
    record["methods"]["domino"]["sets"]["prose"]["speedup"] = 1.5
    after = write_report({"main": record}, tmp_path).read_text()
    assert "1.61×" in before
    assert "1.61×" not in after
    assert "1.50×" in after


def test_only_plain_has_no_pictures(record, tmp_path):
    record["methods"] = {"plain": record["methods"]["plain"]}
    record["methods"]["plain"]["overall"]["acceptance_per_position"] = {"reached": [], "conditional": []}
    write_report({"main": record}, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["report.md"]


def test_script_refuses_what_is_no_record(record, tmp_path):
    (tmp_path / "a").mkdir()
    for path, content in (("x.json", {}), ("main.json", record), ("a/main.json", record)):
        (tmp_path / path).write_text(json.dumps(content))
    with pytest.raises(ValueError, match="neither"):
        report_script.main([str(tmp_path / "x.json"), "-o", str(tmp_path / "r")])
    with pytest.raises(ValueError, match="different names"):
        report_script.main([str(tmp_path / "main.json"), str(tmp_path / "a" / "main.json"), "-o", str(tmp_path / "r")])
    report_script.main([str(tmp_path / "main.json"), "-o", str(tmp_path / "r")])
    assert (tmp_path / "r" / "report.md").exists()
