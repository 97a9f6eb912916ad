"""`scripts/generate.py` in-process, on a tiny pair saved to disk."""

import json
import re

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import CompileConfig, PreTrainedTokenizerFast

from hf_domino.demo import load_default_pair
from hf_domino.evaluation.methods import Unavailable
from scripts import generate
from tests.tiny import VOCAB_SIZE, skilled_drafter, tiny_target

CHAT_TEMPLATE = "{% for message in messages %}w4 {{ message['content'] }} {% endfor %}w5"


@pytest.fixture(scope="module")
def pair_arguments(tmp_path_factory):
    """--model and --drafter of a target that writes words `w0` to `w60`, and of a drafter that it often agrees with."""
    root = tmp_path_factory.mktemp("pair")
    target = tiny_target(context=0.1, eos_token_id=None)
    target.save_pretrained(root / "target")
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCAB_SIZE)}, unk_token="w3"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w3", pad_token="w0")
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(root / "target")
    skilled_drafter(target).save_pretrained(root / "drafter")
    return ["--model", str(root / "target"), "--drafter", str(root / "drafter"), "--dtype", "float32"]


@pytest.fixture(autouse=True)
def threads_restored():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def plain_answer(pair_arguments, prompt, tokens):
    model, tokenizer, _ = load_default_pair(torch.float32, pair_arguments[1], pair_arguments[3])
    inputs = tokenizer(f"w4 {prompt} w5", return_tensors="pt", return_token_type_ids=False)
    output = model.generate(**inputs, max_new_tokens=tokens, do_sample=False)
    return tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)


def test_streams_the_targets_own_answer(pair_arguments, capsys):
    generate.main(["w7 w8 w9", "--max-new-tokens", "20", *pair_arguments])

    assert capsys.readouterr().out.strip() == plain_answer(pair_arguments, "w7 w8 w9", 20)


def test_compare_prints_both_answers_and_what_the_drafter_did(pair_arguments, capsys, monkeypatch):
    def load_eager_pair(*arguments):
        model, tokenizer, drafter = load_default_pair(*arguments)
        drafter.generation_config.num_assistant_tokens_schedule = "constant"  # whatever it costs on this machine
        return model, tokenizer, drafter

    monkeypatch.setattr(generate, "load_default_pair", load_eager_pair)
    generate.main(["--compare", "w7 w8 w9", "--max-new-tokens", "30", "--threads", "1", *pair_arguments])

    output = capsys.readouterr().out
    answer = plain_answer(pair_arguments, "w7 w8 w9", 30)
    without, with_it = output.split("--- with the drafter\n")
    assert without.removeprefix("--- without the drafter\n").strip() == answer
    assert with_it.splitlines()[0] == answer
    found = re.search(r"--- ([\d.]+)x \(([\d.]+) -> ([\d.]+) tokens/s\), acceptance length ([\d.]+), drafter", output)
    ratio, plain_rate, drafted_rate, acceptance = map(float, found.groups())
    assert ratio == pytest.approx(drafted_rate / plain_rate, rel=0.02)
    assert acceptance > 1.2
    assert output.rstrip().endswith("same tokens")
    assert torch.get_num_threads() == 1


def test_both_ways_are_compiled_where_that_is_asked(pair_arguments, capsys, monkeypatch):
    calls = []

    def without_kernels(model):
        config = CompileConfig(backend="eager")
        config._compile_all_devices = True
        calls.append(model)
        return {"cache_implementation": "static", "compile_config": config}

    monkeypatch.setattr(generate, "compiled_arguments", without_kernels)
    torch._dynamo.reset()
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    generate.main(["--compare", "--compile", "w7 w8 w9", "--max-new-tokens", "12", *pair_arguments])
    assert capsys.readouterr().out.rstrip().endswith("same tokens")
    assert len(calls) == 5  # a check, and both ways twice
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] >= before + 2


def test_compiling_without_a_compiler_is_refused_before_anything_is_answered(pair_arguments, capsys, monkeypatch):
    def unavailable(model):
        raise Unavailable("install g++")

    monkeypatch.setattr(generate, "compiled_arguments", unavailable)
    with pytest.raises(SystemExit):
        generate.main(["--compile", "w7", *pair_arguments])
    assert "install g++" in capsys.readouterr().err


def test_many_prompts_are_summed_up_and_recorded(pair_arguments, tmp_path, capsys):
    prompts, record_file = tmp_path / "prompts.jsonl", tmp_path / "record.json"
    rows = [{"prompt": "w7 w8"}, {"turns": ["w9 w10 w11", "never asked"]}, {"prompt": "w12"}]
    prompts.write_text("\n".join(map(json.dumps, rows)))

    generate.main(
        [
            "--compare",
            "--prompts",
            str(prompts),
            "--output",
            str(record_file),
            "--max-new-tokens",
            "16",
            *pair_arguments,
        ]
    )

    last = capsys.readouterr().out.splitlines()[-1]
    record = json.loads(record_file.read_text())
    ratios = sorted(row["ratio"] for row in record["prompts"])
    assert last.startswith(f"3 prompts: median {ratios[1]:.2f}x") and last.endswith("same tokens in 3")
    assert [row["prompt"] for row in record["prompts"]] == ["w7 w8", "w9 w10 w11", "w12"]
    assert all(row["tokens"] == 16 and row["drafter_share"] > 0 and row["rounds"] > 0 for row in record["prompts"])
    assert record["settings"]["max_new_tokens"] == 16
    assert record["environment"]["threads"] >= 1


def test_sampling_reaches_both_ways(pair_arguments, capsys):
    generate.main(["w7 w8 w9", "--temperature", "1.5", "--seed", "3", "--max-new-tokens", "40", *pair_arguments])
    sampled = capsys.readouterr().out.strip()
    assert sampled != plain_answer(pair_arguments, "w7 w8 w9", 40)

    generate.main(
        ["w7 w8 w9", "--compare", "--temperature", "1.5", "--seed", "3", "--max-new-tokens", "40", *pair_arguments]
    )
    assert capsys.readouterr().out.splitlines()[1] == sampled


def test_a_difference_is_told_with_the_targets_margin(pair_arguments):
    model, tokenizer, _ = load_default_pair(torch.float32, pair_arguments[1], pair_arguments[3])
    prompt_ids = tokenizer("w4 w7 w5")["input_ids"]
    plain = generate.Measurement([[6, 7, 8]], seconds=2.0)
    drafted = generate.Measurement(
        [[6, 9, 8]], seconds=1.0, drafted=[2], accepted=[1], draft_seconds=1, verify_seconds=4
    )

    comparison = generate._comparison(model, "w7", prompt_ids, plain, drafted, greedy=True)

    with torch.no_grad():
        top = model(torch.tensor([[*prompt_ids, 6]])).logits[0, -1].topk(2).values
    assert comparison.difference["margin"] == pytest.approx(float(top[0] - top[1]), rel=1e-4)
    assert str(comparison).startswith("2.00x (1.5 -> 3.0 tokens/s), acceptance length 2.00, drafter 25% of verifying")
    assert "tokens differ from the 2. on" in str(comparison)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give either a prompt or --prompts"),
        (["hello", "--prompts", "some.jsonl"], "give either a prompt or --prompts"),
        (["hello", "--output", "record.json"], "add --compare"),
        (["hello", "--dtype", "bf17"], "--dtype bf17 is no torch dtype"),
    ],
)
def test_bad_arguments_are_refused_before_anything_is_loaded(arguments, message, capsys, monkeypatch):
    monkeypatch.setattr(generate, "load_default_pair", lambda *_: pytest.fail("loaded a model"))

    with pytest.raises(SystemExit):
        generate.main(arguments)

    assert message in capsys.readouterr().err
