"""DominoConfig: what it refuses and by what name, what it takes from a target, and its round trip."""

import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    Gemma3Config,
    LlamaConfig,
    MistralConfig,
    Qwen2VLConfig,
    T5Config,
)

from hf_domino import DominoConfig, DominoDraftModel
from hf_domino.drafter.configuration_domino import spread_taps
from tests.tiny import EOS, FAMILIES, VOCAB_SIZE, tiny_drafter, tiny_target

FIELDS = dict(
    vocab_size=100,
    hidden_size=32,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    num_hidden_layers=2,
    num_target_layers=4,
    mask_token_id=99,
    eos_token_id=1,
)


@pytest.mark.parametrize(
    "wrong",
    [
        {"block_size": "8"},
        {"block_size": True},
        {"block_size": 1},
        {"shift_label": None},
        {"shift_label": 1},
        {"head_type": "lstm"},
        {"target_layer_ids": ["1"]},
        {"target_layer_ids": [1, 4]},
        {"target_layer_ids": [-1]},
        {"target_layer_ids": []},
        {"target_layer_ids": [2, 1]},
        {"target_layer_ids": [1, 1]},
        {"mask_token_id": 100},
        {"mask_token_id": -1},
        {"mask_token_id": 1},
        {"head_rank": 0},
        {"head_hidden_size": 0},
        {"num_hidden_layers": 0},
        {"max_tree_nodes": 0},
        {"max_tree_width": 0},
        {"draft_sources": "target"},
        {"candidate_pool_size": 0},
        {"context_window": 0},
        {"pure_draft_prefix_len": -1},
        {"num_key_value_heads": 3},
        {"layer_types": ["full_attention"]},
        {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": None},
    ],
    ids=str,
)
def test_refuses_by_name(wrong):
    with pytest.raises(StrictDataclassError, match=next(iter(wrong))):
        DominoConfig(**(FIELDS | wrong))


def test_refuses_a_mask_among_several_eos_tokens():
    with pytest.raises(StrictDataclassError, match="mask_token_id 99 is also eos"):
        DominoConfig(**(FIELDS | {"eos_token_id": [1, 99]}))


def test_refuses_a_head_width_that_has_no_whole_heads():
    with pytest.raises(StrictDataclassError, match="head_hidden_size must be a multiple of 32"):
        DominoConfig(**FIELDS, head_type="attention", head_hidden_size=40)


@pytest.mark.parametrize("name", ["blok_size", "gru_hidden_dim", "head_typ"])
def test_refuses_a_misspelt_field(name):
    with pytest.raises(ValueError, match=f"no field '{name}'"):
        DominoConfig(**FIELDS, **{name: 8})


def test_refuses_sizes_no_drafter_has():
    with pytest.raises(ValueError, match="hidden_size"):
        DominoConfig(**(FIELDS | {"hidden_size": 10**9}))


def test_validates_again_on_assignment():
    config = DominoConfig(**FIELDS)
    with pytest.raises(StrictDataclassError, match="block_size"):
        config.block_size = "8"


def test_layers_named_sliding_keep_their_window():
    config = DominoConfig(**FIELDS, layer_types=["sliding_attention", "full_attention"], sliding_window=7)
    assert config.sliding_window == 7 and config.use_sliding_window


@pytest.mark.parametrize(
    "depth, taps, expected",
    [
        (36, 5, [1, 9, 17, 25, 33]),
        (30, 5, [1, 8, 14, 21, 27]),
        (4, 5, [0, 1, 2, 3]),
        (1, 5, [0]),
        (8, 5, [1, 2, 3, 4, 5]),
        (7, 5, [0, 2, 3, 5, 6]),
        (12, 1, [9]),
    ],
)
def test_taps_are_spread_over_the_depth(depth, taps, expected):
    assert spread_taps(depth, taps) == expected


@pytest.mark.parametrize("depth", range(1, 60))
def test_spread_taps_are_always_valid(depth):
    taps = spread_taps(depth)
    assert taps == sorted(set(taps)) and 0 <= taps[0] and taps[-1] < depth and len(taps) == min(5, depth)


@pytest.mark.parametrize("family", FAMILIES)
def test_for_target_takes_the_targets_shape(family):
    config = DominoConfig.for_target(tiny_target(family).config)
    assert (config.vocab_size, config.hidden_size, config.num_target_layers) == (VOCAB_SIZE, 32, 4)
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (4, 2, 8)
    assert (config.block_size, config.num_hidden_layers, config.head_type) == (16, 5, "gru")
    assert config.eos_token_id == EOS and config.mask_token_id == VOCAB_SIZE - 1
    assert not config.tie_word_embeddings and set(config.layer_types) == {"full_attention"}


def test_for_target_takes_the_targets_rope():
    scaled = LlamaConfig(
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 5e5,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        }
    )
    assert DominoConfig.for_target(scaled).rope_parameters == scaled.rope_parameters
    gemma = tiny_target("gemma3").config
    rope = DominoConfig.for_target(gemma).rope_parameters
    assert rope["rope_theta"] == gemma.rope_parameters["full_attention"]["rope_theta"] == 1_000_000.0


@pytest.mark.parametrize("composite", [Gemma3Config(), Qwen2VLConfig()], ids=["gemma3", "qwen2_vl"])
def test_for_target_sees_the_text_model_of_a_composite(composite):
    text = composite.get_text_config()
    config = DominoConfig.for_target(composite)
    assert (config.hidden_size, config.vocab_size) == (text.hidden_size, text.vocab_size)
    assert config.num_target_layers == text.num_hidden_layers
    assert all(isinstance(i, int) for i in config.target_layer_ids)


def test_for_target_chooses_a_mask_that_is_no_special_token():
    target = LlamaConfig(vocab_size=50, eos_token_id=[49, 47], pad_token_id=48, bos_token_id=1)
    assert DominoConfig.for_target(target).mask_token_id == 46


def test_for_target_takes_overrides_and_explicit_choices():
    config = DominoConfig.for_target(
        MistralConfig(),
        head_type="attention",
        block_size=8,
        num_hidden_layers=3,
        target_layer_ids=[2, 7],
        mask_token_id=5,
        head_rank=64,
        shift_label=False,
    )
    assert (config.head_type, config.block_size, config.num_hidden_layers) == ("attention", 8, 3)
    assert (config.target_layer_ids, config.mask_token_id, config.head_rank) == ([2, 7], 5, 64)
    assert config.max_drafts == 7 and config.row_offset == 1


def test_for_target_refuses_what_it_cannot_draft_for():
    with pytest.raises(ValueError, match="encoder-decoder"):
        DominoConfig.for_target(T5Config())
    with pytest.raises(ValueError, match="no field 'rank'"):
        DominoConfig.for_target(LlamaConfig(), rank=3)


@pytest.mark.parametrize("head_type", ["gru", "attention", "none"])
@pytest.mark.parametrize("shift_label", [True, False])
def test_round_trip(head_type, shift_label, tmp_path):
    config = DominoConfig.for_target(
        tiny_target().config,
        head_type=head_type,
        shift_label=shift_label,
        block_size=7,
        candidate_pool_size=None,
        context_window=64,
        target_name="a/b",
        target_fingerprint=[0.5, 1.5],
        head_hidden_size=64,
        head_rank=16,
        layer_types=["sliding_attention", "full_attention"],
        sliding_window=9,
        num_hidden_layers=2,
    )
    assert DominoConfig.from_dict(config.to_dict()).to_dict() == config.to_dict()
    config.save_pretrained(tmp_path)
    loaded = AutoConfig.from_pretrained(tmp_path)
    assert type(loaded) is DominoConfig
    for name, value in vars(config).items():
        if not name.startswith("_") and name != "transformers_version":
            assert getattr(loaded, name) == value, name


def test_auto_classes_know_the_drafter(tmp_path):
    drafter = tiny_drafter(tiny_target())
    drafter.save_pretrained(tmp_path)
    for auto in (AutoModel, AutoModelForCausalLM):
        loaded = auto.from_pretrained(tmp_path)
        assert type(loaded) is DominoDraftModel
        assert torch.equal(loaded.fc.weight, drafter.fc.weight)
