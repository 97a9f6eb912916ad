import json

import pytest
import torch

from hf_domino.evaluation.methods import Contenders
from hf_domino.evaluation.prompts import Prompt
from hf_domino.evaluation.report import write_report
from hf_domino.evaluation.studies import STUDIES, prompts_of_length, run_study, untrained
from hf_domino.evaluation.variants import variant

PROMPTS = [Prompt("s", ("Tell me a story.",)), Prompt("s", ("Write code, please.",))]


@pytest.mark.parametrize(("name", "values"), [
    ("block-size", [2, 6]), ("pool", [4, 16]), ("tree", [1, 8]), ("batch", [1, 2]), ("temperature", [0, 0.7]),
    ("length", [24, 48]),
])  # fmt: skip
def test_studies_over_one_drafter(contenders, tmp_path, name, values):
    record = run_study(name, contenders, PROMPTS, tmp_path / f"{name}.json", values=values, max_new_tokens=4)
    assert [point["x"] for point in record["points"]] == values
    for point in record["points"]:
        assert point["methods"]["domino"]["speedup"] > 0
        assert point["methods"]["domino"]["identical"] == 1
    assert record == json.loads((tmp_path / f"{name}.json").read_text())
    report = write_report({name: record}, tmp_path / "report").read_text()
    assert STUDIES[name].question in report
    assert (tmp_path / "report" / f"{name}.png").stat().st_size > 1000
    assert {path.name for path in tmp_path.iterdir()} == {f"{name}.json", "report"}


def test_studies_over_drafters(contenders, tmp_path):
    drafter = contenders.drafters[""]
    both = Contenders(
        contenders.model,
        contenders.tokenizer,
        {"": drafter, "gru": drafter, "none": variant(drafter, head_type="none")},
    )
    record = run_study("head", both, PROMPTS, tmp_path / "head.json", max_new_tokens=4)
    assert [point["x"] for point in record["points"]] == ["gru", "none"]
    assert set(record["points"][0]["methods"]) == {"domino", "domino-chain", "base"}
    assert "head.png" in write_report({"head": record}, tmp_path).read_text()


def test_drafts_as_long_as_they_pay_are_set_beside_fixed_lengths(contenders, tmp_path):
    record = run_study("draft-length", contenders, PROMPTS, tmp_path / "d.json", values=[1, 3], max_new_tokens=8)
    one, three = record["points"]
    assert one["methods"]["as many as pay"] == three["methods"]["as many as pay"]
    assert one["methods"]["always that many"]["drafted_per_round"] <= 1
    assert three["methods"]["always that many"]["drafted_per_round"] > 1.5
    assert one["sets"]["plain"]["s"]["speedup"] == 1 and one["methods"]["as many as pay"]["identical"] == 1
    assert "draft-length.png" in write_report({"draft-length": record}, tmp_path).read_text()


def test_an_untrained_drafter_of_the_same_shape_is_set_beside_none(contenders, tmp_path):
    record = run_study("no-help", contenders, PROMPTS, tmp_path / "n.json", values=[8, 12])
    assert [point["x"] for point in record["points"]] == [8, 12]
    for point in record["points"]:
        assert set(point["methods"]) == {"drafter alone", "with the text's branches"}
        for kind, figures in point["methods"].items():
            assert 0 < point["worst"][kind] <= figures["speedup"] and figures["identical"] == 1
    assert {path.name for path in tmp_path.iterdir()} == {"n.json"}
    drafter = contenders.drafters[""]
    stranger = untrained(drafter)
    assert stranger.config.to_dict() == drafter.config.to_dict()
    assert not torch.equal(stranger.fc.weight, drafter.fc.weight)


def test_what_a_study_needs_is_said(contenders, tmp_path):
    for name in ("head", "taps", "curriculum", "vocabulary"):
        with pytest.raises(ValueError, match="--drafters"):
            run_study(name, contenders, PROMPTS, tmp_path / "r.json")
        with pytest.raises(ValueError, match="no values"):
            run_study(name, contenders, PROMPTS, tmp_path / "r.json", values=[1])
    with pytest.raises(ValueError, match="no study"):
        run_study("nothing", contenders, PROMPTS, tmp_path / "r.json")


def test_prompts_of_a_length_end_in_the_question(contenders):
    for prompt in prompts_of_length(contenders, PROMPTS, 60):
        ids = contenders.tokenizer(prompt.turns[0], add_special_tokens=False)["input_ids"]
        assert 58 <= len(ids) <= 64
        assert prompt.set == "60"
        assert prompt.turns[0].endswith(("story.", "please."))
