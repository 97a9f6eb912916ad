"""The metrics, as functions and as `evaluate` loads them from their folders, offline."""

import sys

import evaluate
import pytest

from hf_domino.evaluation.metrics import NAMES, metric_folder
from hf_domino.evaluation.metrics.code_pass_rate.code_pass_rate import extract_code, run_program
from hf_domino.evaluation.metrics.decoding_speedup.decoding_speedup import bootstrap_interval, decoding_speedup
from hf_domino.evaluation.metrics.gsm8k_exact_match.gsm8k_exact_match import final_number
from hf_domino.evaluation.metrics.output_agreement.output_agreement import first_difference
from hf_domino.evaluation.quality import assemble_program, check_program

ROUNDS = [[2, 0, 3], [1]]


@pytest.fixture(scope="module", autouse=True)
def offline(tmp_path_factory):
    # One folder for all: Python looks for the modules where it found the first.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(evaluate.config, "HF_MODULES_CACHE", str(tmp_path_factory.mktemp("modules")))
        patch.setattr(evaluate.config, "HF_EVALUATE_OFFLINE", True)
        yield


def load(name):
    return evaluate.load(str(metric_folder(name)))


def test_acceptance_length_counts_the_bonus():
    assert load("acceptance_length").compute(predictions=ROUNDS) == {"acceptance_length": 2.5, "rounds": 4}


def test_acceptance_per_position():
    found = load("acceptance_per_position").compute(predictions=ROUNDS)
    assert found["reached"] == [0.75, 0.5, 0.25]
    assert found["conditional"] == [0.75, 2 / 3, 0.5]
    assert sum(found["reached"]) + 1 == load("acceptance_length").compute(predictions=ROUNDS)["acceptance_length"]


def test_speedup_is_the_median_of_ratios():
    found = load("decoding_speedup").compute(predictions=[30.0, 88.0, 20.0], references=[20.0, 40.0, 20.0])
    assert found["speedup"] == 1.5
    assert found["speedup_ci95"] == [1.0, 2.2]


def test_bootstrap_interval_narrows_with_more_values_and_repeats():
    few, many = ([1.0 + 0.1 * (i % 10) for i in range(n)] for n in (10, 500))
    assert bootstrap_interval(few) == bootstrap_interval(few)
    widths = [high - low for low, high in map(bootstrap_interval, (few, many))]
    assert 0 < widths[1] < widths[0] / 2


@pytest.mark.parametrize(("method", "baseline"), [([], []), ([1.0], [1.0, 2.0]), ([0.0], [1.0]), ([1.0], [0.0])])
def test_speedup_refuses_what_is_no_pair_of_rates(method, baseline):
    with pytest.raises(ValueError, match="rates|Rates"):
        decoding_speedup(method, baseline)


def test_output_agreement():
    found = load("output_agreement").compute(
        predictions=[[5, 6], [5, 7], [5]], references=[[5, 6], [5, 8], [5, 6]], margins=[9.0, 0.1, 3.0]
    )
    assert found == {"identical": 1 / 3, "near_ties": 0.5, "first_differences": [-1, 1, 1]}


def test_first_difference_of_a_text_that_ends_sooner():
    assert first_difference([1, 2], [1, 2, 3]) == 2
    assert first_difference([1, 2, 3], [1, 2]) == 2
    assert first_difference([], []) is None


@pytest.mark.parametrize(("text", "number"), [
    ("... so 3 + 4 = 7.\n#### 7", 7), ("The answer is $1,200.50.", "1200.50"), ("minus: -3", -3),
    (r"We get \boxed{42} of 50", 42), ("#### 5 apples of 9", 5), ("none", None), ("it is .5", "0.5"),
])  # fmt: skip
def test_final_number(text, number):
    found = final_number(text)
    assert found is None if number is None else found == type(found)(number)


def test_gsm8k_exact_match():
    metric = load("gsm8k_exact_match")
    found = metric.compute(predictions=["it is 8.0", "it is 9", "no idea"], references=["#### 8", "#### 8", "8"])
    assert found == {"exact_match": 1 / 3}
    with pytest.raises(ValueError, match="no number"):
        metric.compute(predictions=["1"], references=["none"])


def test_code_pass_rate_needs_consent():
    metric = load("code_pass_rate")
    with pytest.raises(ValueError, match="allow_code"):
        metric.compute(predictions=["x = 1"], references=["assert x"])
    found = metric.compute(predictions=["x = 1", "x = 0"], references=["assert x"] * 2, allow_code=True)
    assert found == {"pass_rate": 0.5, "passed": [True, False]}


@pytest.mark.parametrize("program", [
    "raise SystemExit(0)", "import os; os._exit(0)", "def f(:", "while True: pass", "import time; time.sleep(60)",
    "x = bytearray(2 << 30)", "open('f', 'wb').write(bytes(8 << 20))",
    "import os, time\nif os.fork() == 0:\n    time.sleep(60)\nelse:\n    1 / 0",
])  # fmt: skip
def test_programs_that_fail_or_overstep_do_not_pass(program):
    assert not run_program(program, timeout=1.0, memory_mib=256)


def test_programs_see_neither_the_environment_nor_the_working_folder(monkeypatch):
    monkeypatch.setenv("A_SECRET", "1")
    assert run_program("import os\nassert 'A_SECRET' not in os.environ\nassert os.listdir() == ['program.py']")


def test_extract_code():
    assert extract_code("Sure:\n```python\ndef f(): pass\n```\nUse:\n```\nf()\n```") == "def f(): pass\n"
    assert extract_code("```py\nx = 1") == "x = 1"
    assert extract_code("x = 1") == "x = 1"


def test_humaneval_rows():
    row = {"prompt": "def f(x):\n", "entry_point": "f", "test": "def check(candidate):\n    assert candidate(1) == 2\n"}
    assert check_program(row, "    return x + 1\n")
    assert check_program(row, "```python\ndef f(x):\n    return x + 1\n```")
    assert not check_program(row, "    return x\n")
    assert assemble_program(row, "    return x").startswith("def f(x):\n    return x\n")


@pytest.mark.parametrize("name", NAMES)
def test_folders_are_complete_spaces(name):
    folder = metric_folder(name)
    assert {path.name for path in folder.iterdir()} >= {"app.py", "README.md", "requirements.txt", f"{name}.py"}
    assert "hf_domino" not in (folder / f"{name}.py").read_text()
    readme = (folder / "README.md").read_text()
    assert "sdk: gradio" in readme
    call = readme.split("metric.compute(")[1].split(")\n")[0]
    expected = eval(readme.split("# ")[-1].split("\n```")[0])
    assert load(name).compute(**eval(f"dict({call})")) == expected


def test_unknown_metric():
    with pytest.raises(ValueError, match="acceptance_length"):
        metric_folder("tau")
    assert sys.modules["hf_domino.evaluation.metrics"].NAMES
