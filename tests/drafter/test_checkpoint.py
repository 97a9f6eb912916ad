"""The community's layout on disk: what loads, under which spellings, what is refused, and what we write."""

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from hf_domino import DominoConfig, DominoDraftModel
from tests.tiny import drafted_text, plain_text, prompt_ids, tiny_drafter, tiny_target

BACKBONE = {"fc.weight", "hidden_norm.weight", "norm.weight"} | {
    f"layers.{i}.{name}.weight"
    for i in range(2)
    for name in (
        "input_layernorm",
        "post_attention_layernorm",
        "self_attn.q_proj",
        "self_attn.k_proj",
        "self_attn.v_proj",
        "self_attn.o_proj",
        "self_attn.q_norm",
        "self_attn.k_norm",
        "mlp.gate_proj",
        "mlp.up_proj",
        "mlp.down_proj",
    )
}
GRU_HEAD = {
    "prefix_gru.weight_ih_l0": (96, 32),
    "prefix_gru.weight_hh_l0": (96, 32),
    "embed_proj.0.weight": (8, 64),
    "embed_proj.2.weight": (61, 8),
}
NESTED = {
    "mask_token_id",
    "target_layer_ids",
    "projector_type",
    "pure_draft_prefix_len",
    "emb_dim",
    "gru_hidden_dim",
    "shift_label",
}
TOP = {
    "model_type",
    "architectures",
    "num_hidden_layers",
    "hidden_size",
    "vocab_size",
    "num_target_layers",
    "block_size",
    "layer_types",
    "rope_parameters",
    "rope_theta",
    "tie_word_embeddings",
    "emb_dim",
    "eos_token_id",
    "bos_token_id",
    "pad_token_id",
    "head_dim",
    "num_attention_heads",
    "num_key_value_heads",
    "intermediate_size",
    "rms_norm_eps",
    "max_position_embeddings",
    "dflash_config",
}


@pytest.fixture
def published(tmp_path: Path) -> Callable[..., Path]:
    """Writes a checkpoint as the community publishes it. `edit` and `rename` change its config and tensors."""

    def write(
        edit: Callable[[dict[str, Any]], Any] = lambda config: None,
        rename: Callable[[str], str] = lambda name: name,
        tensors: Callable[[dict[str, torch.Tensor]], Any] = lambda tensors: None,
        **fields: Any,
    ) -> Path:
        drafter = tiny_drafter(tiny_target(), **fields)
        config = drafter.config.to_dict()
        config = {key: config[key] for key in TOP} | {
            "model_type": "qwen3",
            "architectures": ["DFlashDraftModel"],
            "dtype": "float32",
        }
        config.pop("rope_theta")
        edit(config)
        state = {name: tensor.clone() for name, tensor in drafter.state_dict().items()}
        tensors(state)
        save_file(
            {rename(name): tensor for name, tensor in state.items()},
            tmp_path / "model.safetensors",
            metadata={"format": "pt"},
        )
        (tmp_path / "config.json").write_text(json.dumps(config))
        return tmp_path

    return write


def expected(**fields: Any) -> dict[str, torch.Tensor]:
    return tiny_drafter(tiny_target(), **fields).state_dict()


def assert_loads(folder: Path, **fields: Any) -> DominoDraftModel:
    loaded = DominoDraftModel.from_pretrained(folder)
    torch.testing.assert_close(loaded.state_dict(), expected(**fields), rtol=0, atol=0)
    return loaded


def test_what_is_saved_has_the_communitys_names(tmp_path):
    drafter = tiny_drafter(tiny_target())
    drafter.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    assert set(tensors) == BACKBONE | set(GRU_HEAD)
    assert {name: tuple(tensors[name].shape) for name in GRU_HEAD} == GRU_HEAD
    assert tensors["fc.weight"].shape == (32, 4 * 32)
    config = json.loads((tmp_path / "config.json").read_text())
    assert set(config["dflash_config"]) == NESTED and TOP <= set(config)
    assert config["model_type"] == "domino" and config["architectures"] == ["DominoDraftModel"]
    assert config["dflash_config"]["projector_type"] == "domino"
    assert (config["dflash_config"]["emb_dim"], config["emb_dim"]) == (8, 8)
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"]
    assert config["tie_word_embeddings"] is False


def test_plain_dflash_saves_no_head(tmp_path):
    tiny_drafter(tiny_target(), "none", shift_label=False).save_pretrained(tmp_path)
    assert set(load_file(tmp_path / "model.safetensors")) == BACKBONE


@pytest.mark.parametrize("head_type", ["gru", "attention", "none"])
def test_saved_then_loaded_is_equal(head_type, tmp_path):
    drafter = tiny_drafter(tiny_target(), head_type, shift_label=False)
    drafter.save_pretrained(tmp_path)
    loaded = assert_loads(tmp_path, head_type=head_type, shift_label=False)
    ignored = {"_name_or_path", "transformers_version"}
    assert {k: v for k, v in loaded.config.to_dict().items() if k not in ignored} == {
        k: v for k, v in drafter.config.to_dict().items() if k not in ignored
    }


@pytest.mark.parametrize("shift_label", [True, False])
@pytest.mark.parametrize("head_type", ["gru", "none"])
def test_published_checkpoints_load_without_a_warning(published, head_type, shift_label, caplog, recwarn, monkeypatch):
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    folder = published(head_type=head_type, shift_label=shift_label)
    caplog.clear()
    loaded = assert_loads(folder, head_type=head_type, shift_label=shift_label)
    assert not caplog.records and not recwarn.list
    assert loaded.config.shift_label is shift_label and loaded.config.head_type == head_type


def test_a_loaded_published_drafter_drafts(published):
    target = tiny_target()
    loaded = DominoDraftModel.from_pretrained(published())
    ids = prompt_ids(5)
    assert torch.equal(drafted_text(target, loaded, ids, max_new_tokens=12), plain_text(target, ids, max_new_tokens=12))
    assert loaded.drafting_stats.drafted


def rope_v4(config):
    config["rope_theta"] = config.pop("rope_parameters")["rope_theta"] + 5.0
    config["rope_scaling"] = None


def rope_v4_scaled(config):
    config["rope_theta"] = config.pop("rope_parameters")["rope_theta"] + 5.0
    config["rope_scaling"] = {"type": "linear", "factor": 2.0}


def rope_v5(config):
    config["rope_parameters"] = {"rope_type": "linear", "factor": 2.0, "rope_theta": 10005.0}


def rope_both(config):
    rope_v5(config)
    config["rope_theta"] = 10005
    config["rope_scaling"] = {"rope_type": "linear", "factor": 2.0}


@pytest.mark.parametrize("spelling, factor", [(rope_v4, 1.0), (rope_v4_scaled, 2.0), (rope_v5, 2.0), (rope_both, 2.0)])
def test_rope_spellings(published, spelling, factor):
    loaded = DominoDraftModel.from_pretrained(published(spelling))
    frequencies = 10005.0 ** (-torch.arange(0, 8, 2) / 8) / factor
    torch.testing.assert_close(loaded.rotary_emb.inv_freq, frequencies)
    assert loaded.config.to_dict()["rope_theta"] == 10005.0


def move(config, key, place):
    value = config.pop(key, None) or config["dflash_config"].pop(key, None)
    config["dflash_config"].pop(key, None)
    (config if place == "top" else config["dflash_config"])[key] = value


@pytest.mark.parametrize("place", ["top", "nested"])
@pytest.mark.parametrize("key", ["block_size", "emb_dim", "layer_types", "num_target_layers", "projector_type"])
def test_either_place(published, key, place):
    loaded = assert_loads(published(lambda config: move(config, key, place)))
    assert (loaded.config.block_size, loaded.config.head_rank, loaded.config.head_type) == (6, 8, "gru")


@pytest.mark.parametrize(
    "key, other",
    [
        ("block_size", 4),
        ("emb_dim", 4),
        ("layer_types", ["full_attention"] * 3),
        ("projector_type", "dflash"),
        ("shift_label", False),
    ],
)
def test_one_setting_with_two_values_is_refused(published, key, other):
    def edit(config):
        move(config, key, "nested")
        config[key] = other

    with pytest.raises(ValueError, match=f"{key} twice"):
        DominoDraftModel.from_pretrained(published(edit))


@pytest.mark.parametrize(
    "edit",
    [
        lambda c: c.update(rope_theta=5.0),
        lambda c: c.update(rope_scaling={"rope_type": "linear", "factor": 2.0}),
    ],
)
def test_two_different_ropes_are_refused(published, edit):
    with pytest.raises(ValueError, match="RoPE twice"):
        DominoDraftModel.from_pretrained(published(edit))


def set_nested(**values):
    return lambda config: config["dflash_config"].update(values)


@pytest.mark.parametrize(
    "edit, message",
    [
        (lambda c: c.pop("rope_parameters"), "no `rope_theta`"),
        (lambda c: c.pop("block_size"), "no `block_size`"),
        (lambda c: c.pop("num_target_layers"), "no `num_target_layers`"),
        (lambda c: c["dflash_config"].pop("shift_label"), "no `shift_label`.*Add"),
        (lambda c: c["dflash_config"].pop("mask_token_id"), "lacks mask_token_id"),
        (lambda c: c["dflash_config"].pop("target_layer_ids"), "lacks target_layer_ids"),
        (lambda c: c["dflash_config"].pop("gru_hidden_dim"), "lacks gru_hidden_dim"),
        (lambda c: c["dflash_config"].pop("pure_draft_prefix_len"), "lacks pure_draft_prefix_len"),
        (lambda c: c.pop("dflash_config"), "not of a drafter"),
        (set_nested(projector_type="dspark"), "'dspark' is another kind of drafter"),
        (set_nested(projector_type="dflash2"), "'dflash2' is another kind of drafter"),
        (set_nested(new_trick=1), "dflash_config has 'new_trick'"),
        (lambda c: c.update(domino_config={"pool": 3}), "domino_config has 'pool'"),
        (lambda c: c.update(hiden_size=3), "no field 'hiden_size'"),
        (lambda c: c.update(layer_types=["sliding_attention"] * 2), "no `sliding_window`"),
        (set_nested(target_layer_ids=[1, 9]), "target_layer_ids"),
        (set_nested(mask_token_id=1), "mask_token_id"),
    ],
)
def test_configurations_that_are_refused(published, edit, message):
    with pytest.raises(Exception, match=message):
        DominoDraftModel.from_pretrained(published(edit))


def test_causal_v5_is_the_gru_head(published):
    loaded = assert_loads(published(set_nested(projector_type="causal_v5")))
    assert loaded.config.head_type == "gru" and loaded.config.to_dict()["dflash_config"]["projector_type"] == "domino"


def test_plain_dflash_needs_neither_projector_nor_shift_label(published):
    def edit(config):
        config["dflash_config"] = {key: config["dflash_config"][key] for key in ("mask_token_id", "target_layer_ids")}
        config.pop("emb_dim")

    loaded = assert_loads(published(edit, head_type="none", shift_label=False), head_type="none", shift_label=False)
    assert loaded.config.shift_label is False and loaded.config.max_drafts == 5


def test_tied_embeddings_are_ignored(published):
    assert assert_loads(published(lambda c: c.update(tie_word_embeddings=True))).config.tie_word_embeddings is False


def test_sliding_layers_inside_dflash_config(published):
    def edit(config):
        config.pop("layer_types")
        config["dflash_config"] |= {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 5}

    loaded = assert_loads(published(edit))
    assert loaded.config.sliding_window == 5
    assert loaded.config.layer_types == ["sliding_attention", "full_attention"]


HEAD_NAMES = ("prefix_gru.", "embed_proj.")


@pytest.mark.parametrize(
    "rename",
    [
        lambda name: f"logit_head.{name}" if name.startswith(HEAD_NAMES) else name,
        lambda name: f"draft_model.{name}",
        lambda name: f"dflash_module.{name}",
        lambda name: f"model.{name}",
        lambda name: f"logit_head.{name}" if name.startswith(HEAD_NAMES) else f"model.{name}",
        lambda name: f"draft_model.logit_head.{name}" if name.startswith(HEAD_NAMES) else f"draft_model.{name}",
        lambda name: f"model.dflash_module.{name}",
    ],
    ids=["logit_head", "draft_model", "dflash_module", "model", "mixed", "nested_head", "twice"],
)
def test_prefixes_are_taken_off_and_never_written(published, rename, tmp_path):
    loaded = assert_loads(published(rename=rename))
    loaded.save_pretrained(tmp_path / "again")
    assert set(load_file(tmp_path / "again" / "model.safetensors")) == BACKBONE | set(GRU_HEAD)


def test_a_domino_checkpoint_never_loads_as_plain_dflash(published):
    def edit(config):
        config["dflash_config"]["projector_type"] = "dflash"

    with pytest.raises(ValueError, match='holds the tensors of a Domino head.*projector_type to "domino"'):
        DominoDraftModel.from_pretrained(published(edit))


def test_plain_dflash_never_loads_as_domino(published):
    folder = published(head_type="none")
    config = json.loads((folder / "config.json").read_text())
    config["dflash_config"]["projector_type"] = "domino"
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"Missing: embed_proj.0.weight; .*prefix_gru.weight_hh_l0"):
        DominoDraftModel.from_pretrained(folder)


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda t: t.pop("fc.weight"), "Missing: fc.weight"),
        (lambda t: t.pop("layers.1.self_attn.q_norm.weight"), "Missing: layers.1.self_attn.q_norm.weight"),
        (lambda t: t.update({"embed_tokens.weight": torch.zeros(61, 32)}), "Unexpected: embed_tokens.weight"),
        (
            lambda t: t.update({"layers.2.mlp.up_proj.weight": torch.zeros(2, 2)}),
            "Unexpected: layers.2.mlp.up_proj.weight",
        ),
        (
            lambda t: t.update({"fc.weight": torch.zeros(32, 96)}),
            r"Misshapen: fc.weight \(32, 96\), expected \(32, 128\)",
        ),
        (lambda t: t.update({"embed_proj.2.weight": torch.zeros(60, 8)}), "Misshapen: embed_proj.2.weight"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(published, change, message):
    with pytest.raises(ValueError, match=message):
        DominoDraftModel.from_pretrained(published(tensors=change))


def test_the_same_refusals_for_a_state_dict_in_memory():
    drafter = tiny_drafter(tiny_target())
    tensors = dict(drafter.state_dict())
    del tensors["norm.weight"]
    with pytest.raises(ValueError, match="Missing: norm.weight"):
        DominoDraftModel.from_pretrained(None, config=drafter.config, state_dict=tensors)


def test_own_settings_stay_out_of_other_runtimes_sight():
    written = DominoConfig.for_target(tiny_target().config, candidate_pool_size=7, context_window=99).to_dict()
    assert written["domino_config"]["candidate_pool_size"] == 7 and written["domino_config"]["context_window"] == 99
    assert not {"candidate_pool_size", "context_window", "max_tree_nodes", "draft_sources", "target_name"} & set(
        written
    )
