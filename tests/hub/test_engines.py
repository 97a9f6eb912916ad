"""The variant for serving engines: exactly the community's keys and tensors, and it loads back."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from hf_domino import DominoDraftModel
from tests.tiny import drafted_text, plain_text, prompt_ids, tiny_drafter, tiny_target

NESTED = {
    "mask_token_id",
    "target_layer_ids",
    "projector_type",
    "pure_draft_prefix_len",
    "emb_dim",
    "gru_hidden_dim",
    "shift_label",
}
# Qwen3's own fields, the special token ids, and what Domino adds at the top.
TOP = {
    "architectures",
    "model_type",
    "dtype",
    "torch_dtype",
    "transformers_version",
    "attention_bias",
    "attention_dropout",
    "head_dim",
    "hidden_act",
    "hidden_size",
    "initializer_range",
    "intermediate_size",
    "layer_types",
    "max_position_embeddings",
    "max_window_layers",
    "num_attention_heads",
    "num_hidden_layers",
    "num_key_value_heads",
    "rms_norm_eps",
    "rope_parameters",
    "rope_scaling",
    "rope_theta",
    "sliding_window",
    "tie_word_embeddings",
    "use_cache",
    "use_sliding_window",
    "vocab_size",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    "block_size",
    "dflash_config",
    "emb_dim",
    "num_target_layers",
}
LAYER = [
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
]
HEAD = {"prefix_gru.weight_ih_l0", "prefix_gru.weight_hh_l0", "embed_proj.0.weight", "embed_proj.2.weight"}


def export(drafter: DominoDraftModel, folder: Path) -> tuple[dict, dict[str, torch.Tensor]]:
    drafter.export_for_engines(folder)
    assert {path.name for path in folder.iterdir()} == {"config.json", "model.safetensors"}
    return json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")


@pytest.mark.parametrize("head_type", ["gru", "none"])
def test_keys_and_tensors(tmp_path: Path, head_type: str) -> None:
    target = tiny_target()
    drafter = tiny_drafter(target, head_type, shift_label=head_type == "gru").to(torch.bfloat16)
    config, tensors = export(drafter, tmp_path)
    assert set(config) == TOP
    assert set(config["dflash_config"]) == NESTED
    assert config["model_type"] == "qwen3"
    assert config["architectures"] == ["DFlashDraftModel"]
    assert config["dflash_config"]["projector_type"] == {"gru": "domino", "none": "dflash"}[head_type]
    assert config["dflash_config"]["shift_label"] is (head_type == "gru")
    assert config["emb_dim"] == config["dflash_config"]["emb_dim"] == 8
    assert config["block_size"] == 6
    assert config["num_target_layers"] == 4
    assert config["tie_word_embeddings"] is False
    assert config["dtype"] == config["torch_dtype"] == "bfloat16"
    expected = {f"layers.{i}.{name}.weight" for i in range(2) for name in LAYER}
    expected |= {"fc.weight", "hidden_norm.weight", "norm.weight"} | (HEAD if head_type == "gru" else set())
    assert set(tensors) == expected
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    width, taps = 32, len(config["dflash_config"]["target_layer_ids"])
    assert tensors["fc.weight"].shape == (width, taps * width)
    if head_type == "gru":
        assert tensors["prefix_gru.weight_ih_l0"].shape == (3 * 32, width)
        assert tensors["prefix_gru.weight_hh_l0"].shape == (3 * 32, 32)
        assert tensors["embed_proj.0.weight"].shape == (8, width + 32)
        assert tensors["embed_proj.2.weight"].shape == (61, 8)


def test_an_export_drafts_as_before(tmp_path: Path) -> None:
    target = tiny_target(context=0.2)
    drafter = tiny_drafter(target)
    export(drafter, tmp_path)
    loaded = DominoDraftModel.from_pretrained(tmp_path)
    assert all(torch.equal(a, b) for a, b in zip(drafter.parameters(), loaded.parameters(), strict=True))
    differing = {
        key
        for key, value in drafter.config.to_dict().items()
        if loaded.config.to_dict()[key] != value and key not in ("_name_or_path", "architectures", "domino_config")
    }
    assert differing <= {"dtype"}
    ids = prompt_ids(6)
    assert torch.equal(drafted_text(target, loaded, ids, max_new_tokens=12), plain_text(target, ids, max_new_tokens=12))


def test_a_draft_vocabulary_goes_with_it(tmp_path: Path) -> None:
    drafter = tiny_drafter(tiny_target())
    drafter.restrict_vocabulary(torch.arange(3, 43))
    config, tensors = export(drafter, tmp_path)
    assert set(config) == TOP | {"draft_vocab_size"}
    assert config["draft_vocab_size"] == tensors["d2t"].numel() == int(tensors["t2d"].sum()) == 40
    loaded = DominoDraftModel.from_pretrained(tmp_path)
    assert torch.equal(loaded.draft_token_ids, drafter.draft_token_ids)


def test_rope_in_both_spellings(tmp_path: Path) -> None:
    yarn = {"rope_type": "yarn", "rope_theta": 5e5, "factor": 4.0, "original_max_position_embeddings": 128}
    drafter = tiny_drafter(tiny_target(), rope_parameters=yarn)
    config, _ = export(drafter, tmp_path)
    assert config["rope_theta"] == 5e5
    assert {**config["rope_scaling"], "rope_theta": 5e5} == config["rope_parameters"]
    assert config["rope_scaling"]["factor"] == 4.0
    loaded = DominoDraftModel.from_pretrained(tmp_path)
    assert torch.equal(loaded.rotary_emb.inv_freq, drafter.rotary_emb.inv_freq)
    for spelling in ({"rope_parameters"}, {"rope_theta", "rope_scaling"}):
        one = {key: value for key, value in config.items() if key not in spelling}
        (tmp_path / "config.json").write_text(json.dumps(one))
        loaded = DominoDraftModel.from_pretrained(tmp_path)
        assert torch.equal(loaded.rotary_emb.inv_freq, drafter.rotary_emb.inv_freq), spelling


def test_engines_have_no_attention_head(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="Serving engines have no 'domino_attention' head"):
        tiny_drafter(tiny_target(), "attention").export_for_engines(tmp_path / "out")
    assert not (tmp_path / "out").exists()
