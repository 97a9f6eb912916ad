"""`scripts/train.py` in-process, on a tiny target: it learns, and the head earns its keep."""

import json
import shutil
from pathlib import Path

import pytest
import torch
import yaml

from hf_domino import DominoConfig, DominoDraftModel
from hf_domino.training.acceptance import acceptance_length
from hf_domino.training.prepare import PrepareArguments
from hf_domino.training.run import RunArguments
from hf_domino.training.settings import parse_settings
from hf_domino.training.shards import ShardWriter
from hf_domino.training.trainer import DominoTrainingArguments
from scripts import train
from tests.tiny import prompt_ids, tiny_target
from tests.training.conftest import word_tokenizer

# The next token is drawn given the last one alone: a draft made in parallel does not know which one that is.
CONTEXT, VOCAB_SIZE = 0.0, 24


@pytest.fixture(scope="module")
def settings(tmp_path_factory):
    """A settings file, and the target and data it names: 120 texts of 32 tokens, sampled from the target."""
    root = tmp_path_factory.mktemp("run")
    target = tiny_target(context=CONTEXT, vocab_size=VOCAB_SIZE)
    target.save_pretrained(root / "target")
    word_tokenizer(VOCAB_SIZE).save_pretrained(root / "target")
    torch.manual_seed(0)
    prompts = prompt_ids(3, 5, VOCAB_SIZE, batch=120)
    texts = target.generate(
        prompts,
        attention_mask=torch.ones_like(prompts),
        do_sample=True,
        top_k=0,
        temperature=0.4,
        max_new_tokens=29,
        eos_token_id=None,
    )
    writer = ShardWriter(root / "data", {"target": "tiny"})
    for row, text in enumerate(texts.tolist()):
        writer.add([(text[:3], text[3:], None)], row)
    writer.flush()
    held_out = [{"prompt": f"w{i} w{i + 9}"} for i in range(7, 14)]
    (root / "held_out.jsonl").write_text("".join(json.dumps(row) + "\n" for row in held_out))
    content = {
        "data": str(root / "data"),
        "target": str(root / "target"),
        "target_dtype": "float32",
        "save_dtype": "float32",
        "warm_start": True,
        "drafter": {
            "block_size": 6,
            "num_hidden_layers": 1,
            "head_rank": 32,
            "head_hidden_size": 32,
            "candidate_pool_size": None,
        },
        "max_steps": 80,
        "per_device_train_batch_size": 8,
        "learning_rate": "1e-2",
        "num_anchors": 8,
        "base_share": 0.2,
        "handover_share": 0.3,
        "logging_steps": 10,
        "save_strategy": "no",
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        "lr_scheduler_type": "cosine",
    }
    (root / "settings.yaml").write_text(yaml.safe_dump(content))
    return root


def run(settings, output, *flags):
    return train.main([str(settings / "settings.yaml"), "--output_dir", str(output), *flags])


def column(trainer, key):
    return [entry[key] for entry in trainer.state.log_history if key in entry]


def accepted(folder):
    target = tiny_target(context=CONTEXT, vocab_size=VOCAB_SIZE)
    drafter = DominoDraftModel.from_pretrained(folder, dtype=torch.float32)
    tokens, forwards = acceptance_length(target, drafter, list(prompt_ids(3, 321, VOCAB_SIZE, batch=6)), 24)
    return tokens / forwards


def test_the_loss_falls_and_the_head_accepts_more_than_its_twin_without(settings, tmp_path):
    domino = run(
        settings,
        tmp_path / "domino",
        "--held_out",
        str(settings / "held_out.jsonl"),
        "--held_out_limit",
        "4",
        "--eval_strategy",
        "steps",
        "--eval_steps",
        "40",
        "--eval_max_new_tokens",
        "16",
    )
    losses = column(domino, "final_loss")
    assert losses[-1] < losses[0] - 0.5
    assert column(domino, "base_weight")[0] == 1.0 and column(domino, "base_weight")[-1] == 0.0
    acceptance = column(domino, "eval_acceptance_length")
    assert len(acceptance) == 2 and acceptance[1] > 1
    # The twin: the same everything, without the head.
    twin = run(settings, tmp_path / "twin", "--drafter", "head_type=none")
    assert column(twin, "base_loss")[-1] < column(twin, "base_loss")[0]
    assert column(domino, "final_acceptance")[-1] > column(twin, "final_acceptance")[-1] + 0.3
    assert accepted(tmp_path / "domino/final") > accepted(tmp_path / "twin/final") + 0.3


def test_the_final_folder_is_a_drafter_with_its_record(settings, tmp_path):
    run(settings, tmp_path, "--max_steps", "2", "--drafter", "block_size=4", "head_rank=8", "--num_anchors", "3")
    config = json.loads((tmp_path / "final" / "config.json").read_text())
    assert config["block_size"] == 4, "a flag overrides the file"
    assert config["dflash_config"]["gru_hidden_dim"] == 32, "and leaves the rest of the mapping"
    assert config["dflash_config"]["projector_type"] == "domino"
    drafter = DominoDraftModel.from_pretrained(tmp_path / "final")
    assert drafter.config.target_name == str(settings / "target")
    assert len(drafter.config.target_fingerprint) > 10
    record = json.loads((tmp_path / "final" / "training.json").read_text())
    assert record["training_args"]["num_anchors"] == 3
    assert record["training_args"]["learning_rate"] == 1e-2
    assert record["data"]["settings"]["target"] == "tiny"
    assert record["run"]["data"] == str(settings / "data")


def test_it_resumes_from_its_last_checkpoint(settings, tmp_path):
    flags = ["--max_steps", "4", "--logging_steps", "1", "--save_strategy", "steps", "--save_steps", "2"]
    whole = run(settings, tmp_path / "whole", *flags)
    run(settings, tmp_path / "broken", *flags)
    for name in ("checkpoint-4", "final"):
        shutil.rmtree(tmp_path / "broken" / name)
    resumed = run(settings, tmp_path / "broken", *flags)
    assert column(resumed, "loss") == column(whole, "loss")
    expected, found = (
        DominoDraftModel.from_pretrained(tmp_path / name / "final", dtype=torch.float32).state_dict()
        for name in ("whole", "broken")
    )
    assert all(torch.equal(expected[key], found[key]) for key in expected)


@pytest.mark.parametrize(
    ("shares", "weights"),
    [(("0", "0"), [0.0, 0.0]), (("1", "0"), [1.0, 1.0])],
    ids=["final only", "base only"],
)
def test_curriculum_ablations(settings, tmp_path, shares, weights):
    trainer = run(
        settings,
        tmp_path,
        "--max_steps",
        "2",
        "--logging_steps",
        "1",
        "--base_share",
        shares[0],
        "--handover_share",
        shares[1],
    )
    assert column(trainer, "base_weight") == weights


def test_training_goes_on_from_a_drafter(settings, tmp_path):
    run(settings, tmp_path / "first", "--max_steps", "2", "--warm_start", "false")
    # With a learning rate of 0 the drafter comes out as it went in.
    plain = yaml.safe_load((settings / "settings.yaml").read_text())
    del plain["drafter"]
    (tmp_path / "second.yaml").write_text(yaml.safe_dump(plain))
    train.main(
        [
            str(tmp_path / "second.yaml"),
            "--output_dir",
            str(tmp_path / "second"),
            "--max_steps",
            "1",
            "--learning_rate",
            "0",
            "--init_from",
            str(tmp_path / "first/final"),
        ]
    )
    first, second = (
        DominoDraftModel.from_pretrained(tmp_path / name / "final", dtype=torch.float32).state_dict()
        for name in ("first", "second")
    )
    assert all(torch.equal(first[key], second[key]) for key in first)


def test_a_draft_vocabulary_is_cut_at_the_end(settings, tmp_path):
    run(settings, tmp_path, "--max_steps", "2", "--draft_vocab_size", "15")
    drafter = DominoDraftModel.from_pretrained(tmp_path / "final")
    assert drafter.config.draft_vocab_size == 15
    assert drafter.embed_proj[2].weight.shape == (15, 32)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--drafter", "blok_size=4"], "blok_size"),
        (["--drafter", "block_size"], "name=value"),
        (["--data", "nowhere"], "prepare_data"),
        (["--target_dtype", "float31"], "float31"),
        (["--base_share", "1.5"], "base_share"),
    ],
)
def test_mistakes_are_named(settings, tmp_path, flags, message):
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        run(settings, tmp_path, "--max_steps", "1", *flags)


@pytest.mark.parametrize(
    "name", ["smollm2_cpu", "qwen3_8b_gpu", "smollm2_1_backbone", "smollm2_2_handover", "smollm2_3_blocks"]
)
def test_shipped_settings_are_valid(name):
    file = Path(train.__file__).parent / "configs" / f"{name}.yaml"
    given = yaml.safe_load(file.read_text())
    parsed, args = parse_settings(
        [RunArguments, DominoTrainingArguments], [str(file), "--bf16", "false", "--use_cpu", "true"]
    )
    assert args.learning_rate == given["learning_rate"]
    assert parsed.drafter_fields == given.get("drafter", {})
    DominoConfig(num_target_layers=36, vocab_size=151936, **parsed.drafter_fields)


@pytest.mark.parametrize("name", ["smollm2_data", "smollm2_answers"])
def test_shipped_data_settings_are_valid(name):
    file = Path(train.__file__).parent / "configs" / f"{name}.yaml"
    (parsed,) = parse_settings([PrepareArguments], [str(file), "--limit", "3"])
    assert parsed.target_layer_ids == [1, 8, 14, 21, 27] and parsed.limit == 3


def test_a_misspelt_setting_in_the_file_is_named(settings, tmp_path):
    content = (settings / "settings.yaml").read_text() + "num_anchor: 3\n"
    (tmp_path / "settings.yaml").write_text(content)
    with pytest.raises(ValueError, match="num_anchor"):
        train.main([str(tmp_path / "settings.yaml")])


def test_another_target_s_text_is_refused(settings, tmp_path):
    writer = ShardWriter(tmp_path / "data", {"target": "other", "target_fingerprint": [1.0, 2.0]})
    writer.add([([5, 6, 7], [8, 9, 10], None)], 0)
    writer.flush()
    with pytest.raises(ValueError, match="another target"):
        run(settings, tmp_path / "out", "--data", str(tmp_path / "data"))
