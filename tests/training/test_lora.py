"""Adapters: the preset, what a run saves, how it loads, merges and switches, and which PEFT methods hold."""

import json
import os
import shutil
from pathlib import Path

import peft
import pytest
import torch
from packaging import version
from safetensors import safe_open
from torch import nn

from hf_domino import DominoDraftModel
from hf_domino.drafter.drafting_domino import DraftingSession
from hf_domino.drafter.target_domino import Target, unwrap
from hf_domino.training.data import ShardDataset
from hf_domino.training.generate import Generator, Request
from hf_domino.training.lora import (
    METHODS,
    LoraArguments,
    adapter_config,
    add_adapter,
    load_drafter,
    save_adapter,
    train_only,
)
from hf_domino.training.run import FINAL, RunArguments, train
from hf_domino.training.targets import load_target, quantization_settings
from scripts import train as script
from tests.tiny import drafted_text, plain_text, prompt_ids, skilled_drafter, tiny_drafter, tiny_target

from .conftest import training_arguments, word_tokenizer, write_shard

HEADS = ["gru", "attention", "none"]


def moved(model: peft.PeftModel, scale: float = 0.2) -> peft.PeftModel:
    """As if it had been trained: a new adapter changes nothing yet."""
    torch.manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * scale)
    return model.eval()


@torch.no_grad()
def draft(target, drafter):
    """The same few drafts, by the drafter as it is now."""
    drafter = unwrap(drafter)
    torch.manual_seed(3)
    tapped = torch.randn(1, 6, 4 * 32)
    session = DraftingSession(drafter, Target(target, drafter.config))
    session.observe(tapped, [6])
    return session.propose(torch.tensor([7]), depth=6, width=3)


def assert_same_drafts(one, other, tolerance=1e-4):
    torch.testing.assert_close(one.logprobs_BDW, other.logprobs_BDW, rtol=tolerance, atol=tolerance)
    assert torch.equal(one.tokens_BDW, other.tokens_BDW)


def assert_other_drafts(one, other):
    assert not torch.allclose(one.logprobs_BDW, other.logprobs_BDW, atol=1e-2)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A target, and a folder with a drafter for it."""
    folder = tmp_path_factory.mktemp("base") / "drafter"
    target = tiny_target()
    tiny_drafter(target).save_pretrained(folder)
    return target, folder


def load(folder, dtype=torch.float32):
    return DominoDraftModel.from_pretrained(folder, dtype=dtype).eval()


# What is adapted


@pytest.mark.parametrize("head_type", HEADS)
def test_the_preset_reaches_every_matrix(head_type):
    drafter = tiny_drafter(tiny_target(), head_type)
    matrices = [name for name, module in drafter.named_modules() if isinstance(module, nn.Linear | nn.GRU)]
    model = add_adapter(drafter, LoraArguments(lora_rank=2))
    adapted = {name for name, module in drafter.named_modules() if isinstance(module, peft.tuners.lora.LoraLayer)}
    whole = {"prefix_gru"} if head_type == "gru" else set()
    assert adapted | whole == set(matrices)
    frozen = [name for name, p in model.named_parameters() if not p.requires_grad]
    assert frozen and not any("lora_" in name or "modules_to_save" in name for name in frozen)


def test_targets_are_groups_or_names():
    target = tiny_target()

    def adapted(*names):
        model = add_adapter(tiny_drafter(target), LoraArguments(lora_rank=2, lora_targets=list(names)))
        trained = {name.split("base_model.model.")[1] for name, p in model.named_parameters() if p.requires_grad}
        return {name.split(".lora_")[0].split(".modules_to_save")[0] for name in trained}

    assert adapted("fc") == {"fc"}
    assert adapted("head", "gru") == {"embed_proj.0", "embed_proj.2", "prefix_gru"}
    assert adapted("q_proj", "embed_proj.2") == {
        "layers.0.self_attn.q_proj",
        "layers.1.self_attn.q_proj",
        "embed_proj.2",
    }
    assert len(adapted("backbone")) == 2 * 7


def test_rank_and_alpha():
    config = adapter_config(LoraArguments(lora_rank=4), tiny_drafter(tiny_target()))
    assert (config.r, config.lora_alpha) == (4, 8)
    config = adapter_config(LoraArguments(lora_rank=4, lora_alpha=3.0), tiny_drafter(tiny_target()))
    assert config.lora_alpha == 3.0


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"lora_rank": 0}, "lora_rank"),
        ({"lora_alpha": -1.0}, "lora_alpha"),
        ({"lora_dropout": 1.0}, "lora_dropout"),
        ({"lora_method": "ia3", "lora_dropout": 0.1}, "IA3"),
        ({"lora_method": "lorra"}, "lora, dora"),
        ({"lora_method": "adalora"}, "moves its ranks"),
        ({"lora_method": "prompt_tuning"}, "reads no prompt"),
        ({"lora_method": "prefix_tuning"}, "the target's states"),
        ({"lora_method": "trainable_tokens"}, "no embeddings"),
    ],
)
def test_nonsense_is_refused_early(fields, message):
    with pytest.raises(ValueError, match=message):
        LoraArguments(**fields)


@pytest.mark.parametrize(
    ("targets", "method", "message"),
    [
        (["heads"], "lora", "no 'heads'. It has backbone, fc, head, gru"),
        (["norm"], "lora", "no 'norm'"),
        (["gru"], "lora", "trained whole"),
        (["fc", "gru"], "vera", "beside vera"),
    ],
)
def test_targets_that_cannot_be_are_named(targets, method, message):
    with pytest.raises(ValueError, match=message):
        add_adapter(tiny_drafter(tiny_target()), LoraArguments(lora_targets=targets, lora_method=method))


# What PEFT can do with the GRU


def test_target_parameters_reach_a_gru_in_forward_alone(base):
    """Why the GRU is trained whole: a drafter runs its GRU step by step, where PEFT's wrapper has no part."""
    gru = nn.Sequential()
    gru.add_module("gru", nn.GRU(5, 4, bias=False, batch_first=True))
    x = torch.randn(2, 3, 5)
    before = gru.gru(x)[0]
    config = peft.LoraConfig(r=2, target_modules=[], target_parameters=["gru.weight_ih_l0"], init_lora_weights=False)
    peft.get_peft_model(gru, config)
    assert not torch.allclose(gru.gru(x)[0], before)
    target, folder = base
    config = peft.LoraConfig(r=2, target_modules=[], target_parameters=["prefix_gru.weight_ih_l0"])
    model = peft.get_peft_model(load(folder), config)
    assert not hasattr(unwrap(model).prefix_gru, "step")
    with pytest.raises((AttributeError, ValueError)):  # never a draft without the adapter's part
        draft(target, model)
    with pytest.raises(ValueError, match="PrefixGRU.* is not supported"):
        peft.get_peft_model(load(folder), peft.LoraConfig(target_modules=["prefix_gru"]))


def test_the_gru_s_own_copy_is_what_drafts(base):
    target, folder = base
    config = peft.LoraConfig(r=2, target_modules=["fc"], modules_to_save=["prefix_gru"])
    model = peft.get_peft_model(load(folder), config)
    assert_same_drafts(draft(target, model), draft(target, load(folder)))
    with torch.no_grad():
        unwrap(model).prefix_gru.modules_to_save["default"].weight_hh_l0.add_(1.0)
    assert_other_drafts(draft(target, model), draft(target, load(folder)))
    with model.disable_adapter():
        assert_same_drafts(draft(target, model), draft(target, load(folder)))


# Methods


@pytest.mark.parametrize("method", METHODS)
def test_methods_save_load_and_merge(base, tmp_path, method):
    target, folder = base
    model = add_adapter(load(folder), LoraArguments(lora_method=method, lora_rank=2))
    untouched = draft(target, load(folder))
    moved(model, 2.0 if method == "vera" else 0.2)
    wanted = draft(target, model)
    assert_other_drafts(wanted, untouched)
    save_adapter(model, tmp_path / "adapter", torch.float32)
    assert sorted(os.listdir(tmp_path / "adapter")) == ["adapter_config.json", "adapter_model.safetensors"]
    loaded = peft.PeftModel.from_pretrained(load(folder), tmp_path / "adapter")
    assert_same_drafts(draft(target, loaded), wanted, 1e-6)
    merged = loaded.merge_and_unload()
    assert_same_drafts(draft(target, merged), wanted)
    merged.save_pretrained(tmp_path / "merged")
    plain = DominoDraftModel.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    assert plain.state_dict().keys() == load(folder).state_dict().keys()
    assert_same_drafts(draft(target, plain), wanted)


OTHERS = {
    "loha": lambda names: peft.LoHaConfig(r=2, target_modules=names),
    "lokr": lambda names: peft.LoKrConfig(r=2, target_modules=names),
    "oft": lambda names: peft.OFTConfig(oft_block_size=4, r=0, target_modules=names),
    "hra": lambda names: peft.HRAConfig(r=2, target_modules=names),
    "fourierft": lambda names: peft.FourierFTConfig(n_frequency=50, target_modules=names),
    "layernorm": lambda names: peft.LNTuningConfig(target_modules=["norm", "hidden_norm"]),
    "head whole": lambda names: peft.LoraConfig(
        r=2, target_modules=["fc"], modules_to_save=["prefix_gru", "embed_proj.0", "embed_proj.2"]
    ),
}


@pytest.mark.parametrize("method", OTHERS)
def test_drafting_sees_what_other_methods_do(base, method):
    """Made by PEFT itself, without the preset: the matrices that drafting caches hold their part."""
    target, folder = base
    names = ["q_proj", "v_proj", "down_proj", "fc", "embed_proj.0", "embed_proj.2"]
    model = moved(peft.get_peft_model(load(folder), OTHERS[method](names)), 1.0 if method == "layernorm" else 0.2)
    wanted = draft(target, model)
    assert_other_drafts(wanted, draft(target, load(folder)))
    assert_same_drafts(draft(target, model.merge_and_unload()), wanted)


@pytest.mark.parametrize("method", METHODS)
def test_adapters_on_a_bfloat16_drafter(base, tmp_path, method):
    target, folder = base
    target = tiny_target().bfloat16()
    save_adapter(
        moved(add_adapter(load(folder), LoraArguments(lora_method=method, lora_rank=2))), tmp_path, torch.bfloat16
    )
    with safe_open(tmp_path / "adapter_model.safetensors", framework="pt") as file:
        kept = {file.get_tensor(name).dtype for name in file.keys()}  # noqa: SIM118
    assert kept == {torch.bfloat16}
    drafter = peft.PeftModel.from_pretrained(load(folder, torch.bfloat16), tmp_path).eval()
    ids = prompt_ids(5)
    arguments = dict(max_new_tokens=12, eos_token_id=None)
    assert drafted_text(target, drafter, ids, **arguments).shape == plain_text(target, ids, **arguments).shape
    assert drafter.get_base_model().drafting_stats.accepted


# Loading, switching


@pytest.fixture
def two_adapters(base, tmp_path):
    """Folders of two adapters for the same drafter."""
    for name, rank in (("first", 2), ("second", 3)):
        model = moved(add_adapter(load(base[1]), LoraArguments(lora_rank=rank)), 0.2 if name == "first" else 0.1)
        save_adapter(model, tmp_path / name, torch.float32)
    return tmp_path / "first", tmp_path / "second"


def test_adapters_are_switched_between_calls(base, two_adapters):
    target, folder = base
    alone = [draft(target, load_drafter(str(adapter), torch.float32)) for adapter in two_adapters]
    assert_other_drafts(*alone)
    model = peft.PeftModel.from_pretrained(load(folder), two_adapters[0], adapter_name="first")
    model.load_adapter(two_adapters[1], adapter_name="second")
    for name, wanted in [*zip(("first", "second"), alone, strict=True), ("first", alone[0])]:
        model.set_adapter(name)
        assert_same_drafts(draft(target, model), wanted, 1e-5)
    with model.disable_adapter():
        assert_same_drafts(draft(target, model), draft(target, load(folder)), 1e-5)


def test_adapters_without_a_wrapper(base, two_adapters):
    """transformers' own way. Its `set_adapter` asks for a PEFT that is newer than the one needed otherwise."""
    target, folder = base
    wanted = draft(target, load_drafter(str(two_adapters[0]), torch.float32))
    drafter = load(folder)
    drafter.load_adapter(str(two_adapters[0]), adapter_name="first")
    assert_same_drafts(draft(target, drafter), wanted, 1e-5)
    drafter.load_adapter(str(two_adapters[1]), adapter_name="second")
    if version.parse(peft.__version__) < version.parse("0.22"):
        with pytest.raises(ValueError, match="0.22"):
            drafter.set_adapter("first")
    else:
        drafter.set_adapter("first")
        assert_same_drafts(draft(target, drafter), wanted, 1e-5)


def test_an_adapter_s_folder_loads_as_a_drafter(base, two_adapters):
    """transformers reads the base's name from the adapter's configuration."""
    target, _ = base
    drafter = load(two_adapters[0])
    assert_same_drafts(draft(target, drafter), draft(target, load_drafter(str(two_adapters[0]), torch.float32)), 1e-5)


def test_an_adapter_without_its_base_s_name(base, two_adapters):
    path = two_adapters[0] / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"base_model_name_or_path": ""}))
    with pytest.raises(ValueError, match="which drafter"):
        load_drafter(str(two_adapters[0]), torch.float32)


def test_output_stays_with_adapters_on_both_sides(tmp_path):
    """Greedy, float32, unmerged and merged: the same tokens, and drafts are accepted."""
    target = tiny_target(context=0.3)
    skilled_drafter(target).save_pretrained(tmp_path / "drafter")
    drafter = moved(add_adapter(load(tmp_path / "drafter"), LoraArguments(lora_rank=2)), 0.02)
    drafter.get_base_model().generation_config.num_assistant_tokens_schedule = "constant"
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "down_proj"])
    wrapped = moved(peft.get_peft_model(target, config), 0.05)
    ids = prompt_ids(5)
    arguments = dict(max_new_tokens=40, eos_token_id=None)
    unmerged = plain_text(wrapped, ids, **arguments)
    assert not torch.equal(unmerged, plain_text(tiny_target(context=0.3), ids, **arguments)), "the adapter counts"
    assert torch.equal(drafted_text(wrapped, drafter, ids, **arguments), unmerged)
    assert sum(drafter.get_base_model().drafting_stats.accepted) > 0
    merged, merged_drafter = wrapped.merge_and_unload(), drafter.merge_and_unload()
    assert torch.equal(drafted_text(merged, merged_drafter, ids, **arguments), plain_text(merged, ids, **arguments))
    assert sum(merged_drafter.drafting_stats.accepted) > 0


# Runs


@pytest.mark.parametrize("name", ["lora", "smollm2_gsm8k_lora"])
def test_shipped_settings_start_at_the_end_of_the_curriculum(monkeypatch, tmp_path, name):
    seen = {}
    monkeypatch.setattr(script, "load_target", lambda *given: (given, None))
    monkeypatch.setattr(script, "train", lambda *given: seen.update(zip(("run", "args", "target", "_", "lora"), given)))
    file = Path(script.__file__).parent / "configs" / f"{name}.yaml"
    common = [str(file), "--use_cpu", "true", "--output_dir", str(tmp_path), "--target_adapter", "mine"]
    script.main(common)
    assert (seen["args"].base_share, seen["args"].handover_share, seen["args"].final_base_weight) == (0.0, 0.0, 0.1)
    assert seen["lora"].lora and seen["lora"].lora_rank == 16
    assert seen["target"][2:] == ("mine", None)
    script.main([*common, "--base_share", "0.1"])
    assert seen["args"].base_share == 0.1, "a flag still counts"
    script.main([*common, "--lora", "false"])
    assert (seen["args"].base_share, seen["args"].handover_share) == (0.2, 0.5)


@pytest.fixture
def trained_base(target, tmp_path):
    """The folder of a drafter for the target of the shards."""
    tiny_drafter(target).save_pretrained(tmp_path / "drafter")
    return tmp_path / "drafter"


def adapt(target, dataset, folder, drafter, lora=None, run=None, **overrides):
    run = RunArguments(data=str(dataset.folder), init_from=str(drafter), save_dtype="float32", **(run or {}))
    settings = dict(base_share=0.0, handover_share=0.0, final_base_weight=0.1, learning_rate=1e-2)
    args = training_arguments(folder, **(settings | overrides))
    return train(run, args, target, lora=LoraArguments(lora=True, **({"lora_rank": 2} | (lora or {}))))


@pytest.mark.parametrize("method", METHODS)
def test_a_run_learns_and_leaves_the_base_as_it_was(target, dataset, tmp_path, trained_base, method):
    before = load(trained_base).state_dict()
    trainer = adapt(target, dataset, tmp_path / "run", trained_base, {"lora_method": method}, max_steps=8)
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert sum(losses[-3:]) < sum(losses[:3])
    final = tmp_path / "run" / FINAL
    assert sorted(os.listdir(final)) == ["adapter_config.json", "adapter_model.safetensors", "training.json"]
    config = json.loads((final / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(trained_base)
    record = json.loads((final / "training.json").read_text())
    assert record["pair"]["drafter"] == str(trained_base) and record["pair"]["target_adapter"] is None
    assert record["lora"]["lora_method"] == method
    assert 0 < record["lora"]["trainable_parameters"] < record["lora"]["parameters"]
    model = load_drafter(str(final), torch.float32)
    assert_same_drafts(draft(target, model), draft(target, trainer.model.eval()), 1e-5)
    assert_other_drafts(draft(target, model), draft(target, load(trained_base)))
    with model.disable_adapter():
        assert_same_drafts(draft(target, model), draft(target, load(trained_base)), 1e-5)
    after = load(trained_base).state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_a_killed_run_goes_on(target, dataset, tmp_path, trained_base):
    saving = dict(save_strategy="steps", save_steps=2)
    whole = adapt(target, dataset, tmp_path / "whole", trained_base, max_steps=4, **saving)
    adapt(target, dataset, tmp_path / "broken", trained_base, max_steps=4, **saving)
    for name in ("checkpoint-4", FINAL):
        shutil.rmtree(tmp_path / "broken" / name)
    resumed = adapt(target, dataset, tmp_path / "broken", trained_base, max_steps=4, **saving)
    losses = [[entry["loss"] for entry in trainer.state.log_history if "loss" in entry] for trainer in (whole, resumed)]
    assert losses[0] == losses[1]
    assert_same_drafts(draft(target, whole.model.eval()), draft(target, resumed.model.eval()), 1e-6)


def test_a_restricted_drafter_is_adapted(target, dataset, tmp_path):
    drafter = skilled_drafter(target)
    drafter.restrict_vocabulary(torch.arange(3, 50))
    drafter.save_pretrained(tmp_path / "drafter")
    adapt(target, dataset, tmp_path / "run", tmp_path / "drafter", max_steps=2)
    merged = load_drafter(str(tmp_path / "run" / FINAL), torch.float32).merge_and_unload()
    assert merged.config.draft_vocab_size == 47
    merged.save_pretrained(tmp_path / "merged")
    assert_same_drafts(draft(target, load(tmp_path / "merged")), draft(target, merged), 1e-6)


@pytest.mark.parametrize(
    ("run", "message"),
    [
        ({"draft_vocab_size": 8}, "draft_vocab_size"),
        ({"train_only": ["fc"]}, "train_only"),
        ({"drafter": ["block_size=4"]}, "drafter"),
    ],
)
def test_settings_that_contradict_an_adapter(target, dataset, tmp_path, trained_base, run, message):
    with pytest.raises(ValueError, match=f"unset {message}"):
        adapt(target, dataset, tmp_path / "run", trained_base, run=run)


def test_an_adapter_needs_a_drafter(target, dataset, tmp_path):
    run = RunArguments(data=str(dataset.folder))
    with pytest.raises(ValueError, match="init_from"):
        train(run, training_arguments(tmp_path), target, lora=LoraArguments(lora=True))


def test_the_head_alone_is_trained_whole(target, dataset, tmp_path, trained_base):
    run = RunArguments(
        data=str(dataset.folder),
        init_from=str(trained_base),
        save_dtype="float32",
        train_only=["prefix_gru", "embed_proj"],
    )
    train(run, training_arguments(tmp_path / "run", base_share=0.0, handover_share=0.0, max_steps=2), target)
    before, after = load(trained_base).state_dict(), load(tmp_path / "run" / FINAL).state_dict()
    changed = {name.split(".")[0] for name in before if not torch.equal(before[name], after[name])}
    assert changed == {"prefix_gru", "embed_proj"}
    with pytest.raises(ValueError, match="no embed_pro; it has fc"):
        train_only(load(trained_base), ["embed_pro"])


# The target's own adapter


@pytest.fixture
def adapted_target(tmp_path):
    """Folders of a target and of an adapter for it."""
    target = tiny_target(context=0.3)
    target.save_pretrained(tmp_path / "target")
    word_tokenizer().save_pretrained(tmp_path / "target")
    target = type(target).from_pretrained(tmp_path / "target")
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "down_proj"])
    moved(peft.get_peft_model(target, config), 0.05).save_pretrained(tmp_path / "adapter")
    return tmp_path / "target", tmp_path / "adapter"


def test_a_target_loads_with_its_adapter_or_by_it(adapted_target):
    target, adapter = map(str, adapted_target)
    ids = prompt_ids(5)
    arguments = dict(max_new_tokens=20, eos_token_id=None)
    alone = plain_text(load_target(target, "float32")[0], ids, **arguments)
    both = [
        plain_text(found, ids, **arguments)
        for found, _ in (load_target(target, "float32", adapter), load_target(adapter, "float32"))
    ]
    assert torch.equal(*both) and not torch.equal(both[0], alone)
    with pytest.raises(ValueError, match="an adapter itself"):
        load_target(adapter, "float32", adapter)


@pytest.mark.parametrize("named_by", ["target_adapter", "target"])
def test_a_drafter_is_trained_for_a_target_with_its_adapter(adapted_target, tmp_path, named_by):
    folder, adapter = map(str, adapted_target)
    names = {"target": adapter} if named_by == "target" else {"target": folder, "target_adapter": adapter}
    target, _ = load_target(names["target"], "float32", names.get("target_adapter"))
    texts = plain_text(target, prompt_ids(3, 5, batch=12), max_new_tokens=21, eos_token_id=None)
    generated = Generator(target, 4, max_new_tokens=21, max_length=24, stop_ids=[]).run(
        [Request(text[:3].tolist(), key=i) for i, text in enumerate(texts)]
    )
    for answer in generated:  # what scripts/prepare_data.py --target ADAPTER makes
        assert answer.tokens == texts[answer.request.key, 3:].tolist()
    data = ShardDataset(write_shard(tmp_path / "data", list(texts), [torch.arange(24) >= 3] * 12))
    skilled_drafter(tiny_target(context=0.3)).save_pretrained(tmp_path / "drafter")
    trainer = adapt(target, data, tmp_path / "run", tmp_path / "drafter", run=names, max_steps=2)
    record = json.loads((tmp_path / "run" / FINAL / "training.json").read_text())
    assert record["pair"] == {"drafter": str(tmp_path / "drafter"), "target": folder, "target_adapter": adapter}
    assert trainer.target.active_adapter == "default" and not trainer.target.training


# Quantised targets


def test_quantisation_asks_for_what_it_needs(monkeypatch):
    assert quantization_settings(None, torch.bfloat16) == {}
    with pytest.raises(ValueError, match="4bit, 8bit"):
        quantization_settings("3bit", torch.bfloat16)
    monkeypatch.setattr("hf_domino.training.targets.find_spec", lambda name: None)
    with pytest.raises(ImportError, match="bitsandbytes.*tapped_states"):
        quantization_settings("4bit", torch.bfloat16)
    monkeypatch.setattr("hf_domino.training.targets.find_spec", lambda name: "there")
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    with pytest.raises(RuntimeError, match="GPU"):
        quantization_settings("4bit", torch.bfloat16)


def test_quantisation_loads_through_transformers(monkeypatch, adapted_target):
    monkeypatch.setattr("hf_domino.training.targets.find_spec", lambda name: "there")
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    seen = {}

    def from_pretrained(name, **kwargs):
        seen.update(kwargs)
        return tiny_target()

    monkeypatch.setattr("hf_domino.training.targets.AutoModelForCausalLM.from_pretrained", from_pretrained)
    load_target(str(adapted_target[0]), "bfloat16", quantization="4bit")
    config = seen["quantization_config"]
    assert config.load_in_4bit and config.bnb_4bit_quant_type == "nf4" and config.bnb_4bit_use_double_quant
    assert config.bnb_4bit_compute_dtype == torch.bfloat16 and seen["device_map"] == "auto"
    load_target(str(adapted_target[0]), "bfloat16", quantization="8bit")
    assert seen["quantization_config"].load_in_8bit
    with pytest.raises(ValueError, match="embedded target"):
        load_target(None, "bfloat16", quantization="4bit")
