"""The trainer: exact resume, steps split over batches and processes, switches that must not change the result."""

import json
import logging
from types import SimpleNamespace

import peft
import pytest
import torch
from transformers import TrainerCallback

from hf_domino import DominoDraftModel
from hf_domino.training.acceptance import AcceptanceWatch, HeldOutPrompts, acceptance_length
from hf_domino.training.data import ShardDataset
from hf_domino.training.objective import most_probable
from hf_domino.training.trainer import RECORD, DominoTrainer, _check_sharding
from tests.tiny import prompt_ids

from .conftest import answers_mask, small_drafter, training_arguments, write_shard


class Kill(TrainerCallback):
    """Stops a run in the middle of a step, as a signal would."""

    def __init__(self, step: int):
        self.step = step

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            raise KeyboardInterrupt


def run(target, dataset, folder, drafter=None, resume=None, callbacks=None, held_out=None, **overrides):
    drafter = small_drafter(target) if drafter is None else drafter
    trainer = DominoTrainer(
        drafter, target, training_arguments(folder, **overrides), dataset, held_out, callbacks=callbacks
    )
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def losses(trainer) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def assert_same_weights(one, other, **tolerance):
    ours, theirs = one.state_dict(), other.state_dict()
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        torch.testing.assert_close(tensor, theirs[name], **(tolerance or {"rtol": 0, "atol": 0}), msg=name)


@pytest.fixture
def few(texts, tmp_path):
    """20 sequences of various lengths: five steps of four an epoch."""
    cut = [text[: 20 + i] for i, text in enumerate(texts[:20])]
    return ShardDataset(write_shard(tmp_path / "few", cut, [answers_mask(len(text)) for text in cut]))


@pytest.mark.parametrize("saved_at", [3, 5], ids=["within an epoch", "between two"])
def test_a_killed_and_resumed_run_ends_where_an_unbroken_one_does(target, few, tmp_path, saved_at):
    settings = dict(
        max_steps=8,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        frequent_tokens=8,
        random_tokens=12,
        lr_scheduler_type="cosine",
    )
    unbroken = run(target, few, tmp_path / "unbroken", **settings)
    saving = settings | dict(save_strategy="steps", save_steps=saved_at)
    with pytest.raises(KeyboardInterrupt):
        run(target, few, tmp_path / "killed", callbacks=[Kill(saved_at + 1)], **saving)
    torch.manual_seed(99)
    other = small_drafter(target, seed=99)  # whatever it starts from, the checkpoint decides
    resumed = run(target, few, tmp_path / "killed", other, str(tmp_path / f"killed/checkpoint-{saved_at}"), **saving)
    assert_same_weights(resumed.model, unbroken.model)
    assert losses(resumed) == losses(unbroken)
    weights = [[e["base_weight"] for e in t.state.log_history if "loss" in e] for t in (resumed, unbroken)]
    assert weights[0] == weights[1]
    assert len(set(weights[0])) > 2, "the curriculum moved"


def test_accumulated_batches_are_one_step(target, few, tmp_path):
    whole = run(target, few, tmp_path / "a", per_device_train_batch_size=4)
    split = run(target, few, tmp_path / "b", per_device_train_batch_size=2, gradient_accumulation_steps=2)
    assert losses(split) == pytest.approx(losses(whole), rel=1e-4)
    assert_same_weights(split.model, whole.model, rtol=1e-2, atol=3e-4)


def test_activation_checkpointing_changes_nothing(target, few, tmp_path):
    plain = run(target, few, tmp_path / "a", max_steps=3, base_share=0.0)
    saving = run(target, few, tmp_path / "b", max_steps=3, base_share=0.0, activation_checkpointing=True)
    assert saving.model.is_activation_checkpointing
    assert losses(saving) == pytest.approx(losses(plain), rel=1e-5)
    assert_same_weights(saving.model, plain.model, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("frequent", [None, 20])
def test_bfloat16_autocast(target, few, tmp_path, frequent):
    plain = run(target, few, tmp_path / "a", max_steps=4, frequent_tokens=frequent)
    cast = run(target, few, tmp_path / "b", max_steps=4, frequent_tokens=frequent, bf16=True)
    assert losses(cast) != losses(plain), "autocast reached the loss"
    assert losses(cast) == pytest.approx(losses(plain), rel=0.05)
    assert {p.dtype for p in cast.model.parameters()} == {torch.float32}


def test_stored_states_equal_those_computed_on_the_fly(target, few, tmp_path):
    fresh = run(target, few, tmp_path / "a")
    texts = [few[i]["input_ids"] for i in range(len(few))]
    states = [fresh.target_says({"input_ids": text[None]})[0][0] for text in texts]
    masks = [answers_mask(len(text)) for text in texts]
    folder = write_shard(tmp_path / "stored", texts, masks, tapped_states=torch.cat(states))
    stored = run(target, ShardDataset(folder), tmp_path / "b")
    assert losses(stored) == pytest.approx(losses(fresh), rel=1e-4)


@pytest.mark.parametrize("frequent", [None, 20])
def test_distillation_from_stored_distributions_equals_that_on_the_fly(target, few, tmp_path, frequent):
    settings = dict(objective="kl", teacher_top_k=8, frequent_tokens=frequent, random_tokens=15)
    fresh = run(target, few, tmp_path / "a", **settings)
    plain = run(target, few, tmp_path / "b", **(settings | {"objective": "cross_entropy"}))
    assert losses(fresh) != losses(plain)
    texts = [few[i]["input_ids"] for i in range(len(few))]
    best = [most_probable(target(text[None]).logits[0], 8) for text in texts]
    stored = {
        "teacher_ids": torch.cat([found.ids for found in best]).int(),
        "teacher_probs": torch.cat([found.probs for found in best]),
    }
    folder = write_shard(tmp_path / "stored", texts, [answers_mask(len(text)) for text in texts], **stored)
    again = run(target, ShardDataset(folder), tmp_path / "c", **settings)
    assert losses(again) == pytest.approx(losses(fresh), rel=1e-4)


def test_settings_that_do_not_exist_are_refused(tmp_path):
    with pytest.raises(ValueError, match="objective is one of cross_entropy, kl"):
        training_arguments(tmp_path, objective="kld")


@pytest.mark.parametrize("wrong", [{"fsdp_version": 1}, {"transformer_cls_names_to_wrap": ["DominoLayer"]}])
def test_fsdp_of_single_layers_is_refused(wrong):
    plugin = dict(fsdp_version=2, transformer_cls_names_to_wrap=None, min_num_params=0)
    _check_sharding(SimpleNamespace(**plugin))
    with pytest.raises(ValueError, match="NO_WRAP"):
        _check_sharding(SimpleNamespace(**(plugin | wrong)))


def test_grouping_by_length_reads_no_sequence(target, few, tmp_path, monkeypatch):
    trainer = DominoTrainer(
        small_drafter(target),
        target,
        training_arguments(tmp_path, train_sampling_strategy="group_by_length"),
        few,
    )
    monkeypatch.setattr(ShardDataset, "__getitem__", lambda self, index: pytest.fail("read"))
    order = list(trainer._get_train_sampler())
    assert sorted(order) == list(range(20))


def test_the_head_rests_while_the_base_is_trained(target, few, tmp_path):
    before = small_drafter(target).state_dict()
    trained = run(target, few, tmp_path, base_share=1.0).model.state_dict()
    head = [name for name in before if name.startswith(("prefix_gru", "embed_proj"))]
    assert head
    assert all(torch.equal(before[name], trained[name]) for name in head)
    assert not torch.equal(before["fc.weight"], trained["fc.weight"])


def test_sequences_without_an_anchor_are_skipped_and_counted(target, texts, tmp_path):
    sequences = [texts[0], texts[1][:4], texts[2][:2], texts[3]]
    masks = [answers_mask(40), answers_mask(4), answers_mask(2), torch.zeros(40, dtype=torch.bool)]
    dataset = ShardDataset(write_shard(tmp_path / "data", sequences, masks))
    trainer = run(target, dataset, tmp_path / "out", max_steps=2)
    assert trainer.skipped_sequences == 2 * 2, "the third and fourth, in both steps"
    assert all(torch.tensor(losses(trainer)).isfinite())


def test_a_step_without_any_anchor_moves_nothing(target, texts, tmp_path):
    masks = [torch.zeros(40, dtype=torch.bool)] * 4
    dataset = ShardDataset(write_shard(tmp_path / "data", list(texts[:4]), masks))
    trainer = run(target, dataset, tmp_path / "out", max_steps=2)
    assert losses(trainer) == [0.0, 0.0]
    assert_same_weights(trainer.model, small_drafter(target))


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # raised inside peft
def test_adapters_train_and_the_drafter_stays(target, few, tmp_path):
    drafter = small_drafter(target)
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "fc", "embed_proj.2"])
    wrapped = peft.get_peft_model(drafter, config)
    before = {name: p.detach().clone() for name, p in wrapped.named_parameters()}
    trainer = run(target, few, tmp_path, drafter=wrapped, base_share=0.0, handover_share=0.0)
    for name, parameter in wrapped.named_parameters():
        moved = not torch.equal(parameter, before[name])
        assert moved == ("lora_B" in name) or "lora_A" in name, name
    trainer.save_model(str(tmp_path / "adapter"))
    assert (tmp_path / "adapter" / "adapter_model.safetensors").exists()


def test_saved_drafter_loads_and_tells_how_it_was_trained(target, few, tmp_path):
    trainer = run(target, few, tmp_path, num_anchors=5)
    trainer.save_model()
    loaded = DominoDraftModel.from_pretrained(tmp_path, dtype=torch.float32)
    assert_same_weights(loaded, trainer.model)
    record = json.loads((tmp_path / RECORD).read_text())
    assert record["training_args"]["num_anchors"] == 5
    assert record["step"] == record["max_steps"] == 6
    assert record["decay_gamma"] == pytest.approx(3.25)


def test_accepted_length_is_that_of_generate(target, few, tmp_path):
    prompts = HeldOutPrompts(prompt_ids(3, 77, batch=3).tolist())
    trainer = run(
        target,
        few,
        tmp_path,
        held_out=prompts,
        max_steps=4,
        eval_strategy="steps",
        eval_steps=2,
        eval_max_new_tokens=12,
    )
    found = [e["eval_acceptance_length"] for e in trainer.state.log_history if "eval_acceptance_length" in e]
    assert len(found) == 2
    tokens, forwards = acceptance_length(target, trainer.model, list(prompts), 12)
    assert found[-1] == pytest.approx(tokens / forwards, abs=1e-3)
    assert trainer.model.generation_config.num_assistant_tokens_schedule != "constant", "put back"


def test_a_fall_of_the_accepted_length_is_warned_of(caplog):
    watch, state = AcceptanceWatch(tolerance=0.05), type("State", (), {"global_step": 3})()
    with caplog.at_level(logging.WARNING):
        for value in (2.0, 1.95, 2.1):
            watch.on_evaluate(None, state, None, {"eval_acceptance_length": value})
        assert not caplog.records
        watch.on_evaluate(None, state, None, {"eval_acceptance_length": 1.9})
    assert "down from 2.100" in caplog.text


@pytest.mark.parametrize("size", [1, 7])
def test_a_training_block_that_does_not_fit_is_refused(target, few, tmp_path, size):
    with pytest.raises(ValueError, match="train_block_size"):
        run(target, few, tmp_path, train_block_size=size)


def test_shorter_blocks_can_be_trained_first(target, few, tmp_path):
    trainer = run(target, few, tmp_path, train_block_size=3, max_steps=2)
    assert trainer.num_drafts == 3
    assert trainer.gamma < 3.25
