import json
import runpy
import sys
from pathlib import Path

import pytest

from hf_domino.evaluation.prompts import read_prompts
from hf_domino.evaluation.report import summary_table
from tests.evaluation.conftest import tiny_tokenizer
from tests.tiny import skilled_drafter, tiny_target

SCRIPTS = Path(__file__).parents[2] / "scripts"


@pytest.fixture(scope="session")
def pair(tmp_path_factory):
    folder, target = tmp_path_factory.mktemp("pair"), tiny_target(context=0.2)
    target.save_pretrained(folder / "model")
    tiny_tokenizer().save_pretrained(folder / "model")
    skilled_drafter(target).save_pretrained(folder / "drafter")
    return ["--model", str(folder / "model"), "--drafter", str(folder / "drafter"), "--dtype", "float32"]


def script(monkeypatch, name, *arguments):
    monkeypatch.setattr(sys, "argv", [name, *map(str, arguments)])
    runpy.run_path(str(SCRIPTS / name), run_name="__main__")


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "Tell me a story."}\n{"turns": ["Write code."], "set": "code"}\n')
    return path


def test_benchmark_to_report(pair, prompts, tmp_path, monkeypatch, capsys):
    output = tmp_path / "record.json"
    script(
        monkeypatch,
        "benchmark.py",
        *pair,
        "--prompts",
        prompts,
        "--output",
        output,
        "--max-new-tokens",
        6,
        "--methods",
        "domino",
        "prompt-lookup",
        "--block-sizes",
        3,
        "--spec-bench-answers",
        tmp_path / "answers",
    )
    record = json.loads(output.read_text())
    assert list(record["methods"]) == ["plain", "domino", "prompt-lookup", "domino[block_size=3]"]
    assert record["settings"]["labels"].keys() == {"model", "drafter"}
    printed = capsys.readouterr().out
    assert summary_table(record) in printed
    assert f"domino draft round: {record['cost_of_a_draft_round']['domino']['dispatches']} dispatches" in printed
    assert len((tmp_path / "answers" / "domino.jsonl").read_text().splitlines()) == 2

    script(monkeypatch, "report.py", output, "-o", tmp_path / "report")
    report = (tmp_path / "report" / "report.md").read_text()
    assert summary_table(record) in report
    for picture in ("speedup", "acceptance", "time"):
        assert f"record-{picture}.png" in report
        assert (tmp_path / "report" / f"record-{picture}.png").stat().st_size > 1000


def test_study_script(pair, prompts, tmp_path, monkeypatch):
    script(
        monkeypatch,
        "studies.py",
        "tree",
        *pair,
        "--prompts",
        prompts,
        "--output",
        tmp_path / "tree.json",
        "--values",
        1,
        4,
        "--max-new-tokens",
        6,
        "--limit",
        1,
    )
    assert [point["x"] for point in json.loads((tmp_path / "tree.json").read_text())["points"]] == [1, 4]


@pytest.mark.parametrize(("arguments", "message"), [
    (["--model", "somewhere"], "needs a --drafter"), (["--dtype", "int"], "--dtype"),
    (["--drafters", "nolabel"], "LABEL=PATH"), (["--max-new-tokens", "1"], "max_new_tokens"),
])  # fmt: skip
def test_mistakes_end_in_one_line(prompts, tmp_path, monkeypatch, arguments, message):
    with pytest.raises(SystemExit, match=message):
        script(monkeypatch, "benchmark.py", "--prompts", prompts, "--output", tmp_path / "r.json", *arguments)


@pytest.mark.parametrize("name", ["code", "prose"])
def test_own_prompts(name):
    prompts = read_prompts([SCRIPTS / "prompts" / f"{name}.jsonl"])
    assert {prompt.set for prompt in prompts} == {name}
    assert len({prompt.hash for prompt in prompts}) == 20


@pytest.mark.gpu
def test_benchmark_on_a_gpu(pair, prompts, tmp_path, monkeypatch):
    script(
        monkeypatch,
        "benchmark_gpu.py",
        *pair,
        "--prompts",
        prompts,
        "--output",
        tmp_path / "gpu.json",
        "--max-new-tokens",
        6,
        "--minutes",
        1,
    )
    record = json.loads((tmp_path / "gpu.json").read_text())
    assert record["methods"]["domino"]["overall"]["identical"] == 1
    assert record["draft_round_milliseconds"]["chain"] > 0
