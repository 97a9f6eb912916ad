"""The community's checkpoint layout and ours: configuration keys, tensor names, and what is refused.

Layout: z-lab's DFlash and Huang2020's Domino checkpoints, as SGLang, vLLM and TensorRT-LLM read them. Inside the
project there is one set of fields (`DominoConfig`); the names on disk appear in this file only.
"""

import os
import re
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

# DominoConfig field -> key inside `dflash_config`.
NESTED_KEYS = {
    "mask_token_id": "mask_token_id",
    "target_layer_ids": "target_layer_ids",
    "pure_draft_prefix_len": "pure_draft_prefix_len",
    "head_rank": "emb_dim",
    "head_hidden_size": "gru_hidden_dim",
    "shift_label": "shift_label",
}
# Ours alone, kept in a section of their own so that other runtimes pass them by.
OWN_KEYS = (
    "candidate_pool_size",
    "max_tree_nodes",
    "max_tree_width",
    "draft_sources",
    "context_window",
    "target_name",
    "target_fingerprint",
)
PROJECTOR_OF_HEAD = {"gru": "domino", "attention": "domino_attention", "none": "dflash"}
HEAD_OF_PROJECTOR = {projector: head for head, projector in PROJECTOR_OF_HEAD.items()} | {"causal_v5": "gru"}
# Read from `dflash_config` where a checkpoint has them there instead of at the top.
_EITHER_PLACE = ("block_size", "num_target_layers", "layer_types", "sliding_window", "use_sliding_window")
_HEAD_TENSORS = ("prefix_gru.", "prefix_attention.", "embed_proj.")
ADAPTER_FILE = "adapter_model.safetensors"  # PEFT's name
TENSOR_PREFIXES = ("draft_model.", "dflash_module.", "model.", "logit_head.")
# What serving engines read of a drafter's config.json, besides model_type and architectures.
ENGINE_KEYS = (
    "attention_bias",
    "attention_dropout",
    "block_size",
    "bos_token_id",
    "dflash_config",
    "dtype",
    "emb_dim",
    "eos_token_id",
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
    "num_target_layers",
    "pad_token_id",
    "rms_norm_eps",
    "rope_parameters",
    "rope_theta",
    "sliding_window",
    "tie_word_embeddings",
    "transformers_version",
    "use_cache",
    "use_sliding_window",
    "vocab_size",
)


def drafter_fields(config: dict[str, Any]) -> dict[str, Any]:
    """`config.json` in the community's layout -> keyword arguments of `DominoConfig`.

    A dictionary without `dflash_config` is taken to hold `DominoConfig`'s own fields already.

    Raises:
        ValueError: an unknown `projector_type`, an absent `shift_label`, an unknown key in `dflash_config`, or one
            setting given twice with two values.
    """
    config = dict(config)
    nested = config.pop("dflash_config", None)
    if nested is None:
        if config.get("model_type") not in (None, "domino"):
            raise ValueError(
                f"This is the configuration of a {config['model_type']!r} model, not of a drafter: it has no "
                "`dflash_config`."
            )
        return config
    nested, own = dict(nested), config.pop("domino_config", None) or {}
    fields = {key: value for key, value in config.items() if key != "model_type"}

    _take(fields, "projector_type", "projector_type", nested)
    projector = fields.pop("projector_type", None) or "dflash"
    if projector not in HEAD_OF_PROJECTOR:
        raise ValueError(
            f"projector_type {projector!r} is another kind of drafter; this package loads "
            f"{', '.join(sorted(HEAD_OF_PROJECTOR))}."
        )
    fields["head_type"] = HEAD_OF_PROJECTOR[projector]
    for field, key in NESTED_KEYS.items():
        _take(fields, field, key, nested)
    for key in _EITHER_PLACE:
        _take(fields, key, key, nested)
    for place in (nested, fields):  # named, but without a value
        for key in (*NESTED_KEYS.values(), *_EITHER_PLACE, "projector_type"):
            if key in place and place[key] is None:
                del place[key]
    if nested:
        raise ValueError(
            f"dflash_config has {', '.join(map(repr, sorted(nested)))}, which this version does not know; loading "
            "the drafter without would change its drafts. Upgrade hf-domino, or remove the key if it is unused."
        )
    if fields.get("shift_label") is None:
        if fields["head_type"] != "none":
            raise ValueError(
                "dflash_config has no `shift_label`, and runtimes differ in what they take it to be. Add "
                '"shift_label": true if row k predicts the token after it (published Domino), false if row k '
                "predicts the token at its own place (DFlash)."
            )
        fields["shift_label"] = False  # plain DFlash has one convention only
    if fields["head_type"] == "none":
        required: tuple[str, ...] = ("mask_token_id", "target_layer_ids")
    else:
        required = tuple(NESTED_KEYS)
    missing = [NESTED_KEYS[field] for field in required if fields.get(field) is None]
    if missing:
        raise ValueError(f"dflash_config lacks {', '.join(missing)}, without which the drafter cannot be built.")
    if fields.get("block_size") is None:
        raise ValueError("config.json has no `block_size`, neither at the top nor in dflash_config.")
    fields["tie_word_embeddings"] = False  # often left true by tools; a drafter has no embeddings to tie
    if not fields.get("num_target_layers"):
        raise ValueError("config.json has no `num_target_layers`: the depth of the target it was trained for.")
    if "sliding_attention" in (fields.get("layer_types") or ()) and not fields.get("sliding_window"):
        raise ValueError("config.json has layers of sliding_attention but no `sliding_window`: how far do they see?")
    fields["rope_parameters"] = _rope_parameters(fields)
    unknown_own = sorted(set(own) - set(OWN_KEYS))
    if unknown_own:
        raise ValueError(f"domino_config has {', '.join(map(repr, unknown_own))}, which this version does not know.")
    return fields | own


def _rope_parameters(fields: dict[str, Any]) -> dict[str, Any]:
    """Takes RoPE out of `fields`: the v5 spelling (`rope_parameters`) or the v4 one (`rope_theta`, `rope_scaling`).

    A drafter works only with the RoPE that it was trained with, so nothing is guessed.
    """
    theta = fields.pop("rope_theta", None)
    given = [dict(rope) for key in ("rope_parameters", "rope_scaling") if (rope := fields.pop(key, None))]
    thetas = {theta, *(rope.pop("rope_theta", None) for rope in given)} - {None}
    for rope in given:
        old_name = rope.pop("type", "default")
        rope.setdefault("rope_type", old_name)
    if len(thetas) > 1 or any(rope != given[0] for rope in given):
        raise ValueError(
            "config.json gives RoPE twice, with different values (rope_parameters; rope_theta and rope_scaling): keep "
            "those that the drafter was trained with."
        )
    if not thetas:
        raise ValueError("config.json has no `rope_theta`: add the one that the drafter was trained with.")
    return {**(given[0] if given else {"rope_type": "default"}), "rope_theta": thetas.pop()}


def _take(fields: dict[str, Any], field: str, key: str, nested: dict[str, Any]) -> None:
    """Moves one setting, given at the top (by its key on disk) or nested, into `fields[field]`."""
    found = [place.pop(key) for place in (nested, fields) if place.get(key) is not None]
    if len(found) == 2 and found[0] != found[1]:
        raise ValueError(f"config.json gives {key} twice: {found[1]} at the top and {found[0]} in dflash_config.")
    if found:
        fields[field] = found[0]


def community_config(fields: dict[str, Any]) -> dict[str, Any]:
    """`DominoConfig`'s own fields -> `config.json` in the community's layout (model_type stays "domino")."""
    output = dict(fields)
    nested = {key: output.pop(field) for field, key in NESTED_KEYS.items()}
    nested["projector_type"] = PROJECTOR_OF_HEAD[output.pop("head_type")]
    output["emb_dim"] = nested["emb_dim"]  # engines read it at the top
    output["rope_theta"] = (output.get("rope_parameters") or {}).get("rope_theta")  # the v4 spelling
    output["domino_config"] = {key: output.pop(key) for key in OWN_KEYS}
    output["dflash_config"] = nested
    if output["draft_vocab_size"] is None:  # the key says that the checkpoint has a draft vocabulary
        del output["draft_vocab_size"]
    return output


def engine_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """`config.json` in our variant of the community's layout -> the variant that serving engines load.

    RoPE stands in it in both spellings: `rope_parameters` (v5), `rope_theta` and `rope_scaling` (v4).

    Raises:
        ValueError: engines know the GRU head and plain DFlash only.
    """
    projector = config["dflash_config"]["projector_type"]
    if projector not in (PROJECTOR_OF_HEAD["gru"], PROJECTOR_OF_HEAD["none"]):
        raise ValueError(f"Serving engines have no {projector!r} head; only a 'gru' head or none can be exported.")
    rope = config.get("rope_parameters") or {}
    scaling = None if rope.get("rope_type", "default") == "default" else rope
    return {
        "model_type": "qwen3",
        "architectures": ["DFlashDraftModel"],
        **{key: config.get(key) for key in ENGINE_KEYS},
        **{key: config[key] for key in ("draft_vocab_size",) if config.get(key) is not None},
        "rope_scaling": scaling and {key: value for key, value in scaling.items() if key != "rope_theta"},
        "torch_dtype": config.get("dtype"),
    }


def check_weight_files(files: Iterable[str], expected: Mapping[str, torch.Tensor], head_type: str) -> None:
    """Compares the headers of safetensors files with a model, before any weight is read.

    Args:
        expected: the model's state dict; only shapes are looked at (meta tensors will do).

    Raises:
        ValueError: a file is damaged, or its tensors are not the model's.
    """
    prefixes = re.compile(f"^(?:{'|'.join(map(re.escape, TENSOR_PREFIXES))})+")
    found: dict[str, tuple[int, ...]] = {}
    files = list(files)
    if [os.path.basename(path) for path in files] == [ADAPTER_FILE]:
        return  # `load_adapter` comes by here too; PEFT compares its tensors
    for path in files:
        if not str(path).endswith(".safetensors"):
            continue
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118
                    found[prefixes.sub("", name)] = tuple(file.get_slice(name).get_shape())
        except SafetensorError as error:
            raise ValueError(
                f"{path} is damaged ({error}): the download broke off, or the file was never whole. Download it "
                "again with force_download=True."
            ) from error
    shapes = {name: tuple(tensor.shape) for name, tensor in expected.items()}
    info = {
        "missing_keys": shapes.keys() - found.keys(),
        "unexpected_keys": found.keys() - shapes.keys(),
        "mismatched_keys": {
            (name, found[name], shapes[name]) for name in shapes.keys() & found.keys() if found[name] != shapes[name]
        },
    }
    check_loading(info, head_type)


def check_loading(info: dict[str, Any], head_type: str) -> None:
    """Refuses a checkpoint whose tensors are not exactly those of its configuration.

    Args:
        info: transformers' loading info: `missing_keys`, `unexpected_keys`, `mismatched_keys`.

    Raises:
        ValueError: tensors are missing, left over or of other shapes; the message lists them.
    """
    problems = {
        "Missing": sorted(info["missing_keys"]),
        "Unexpected": sorted(info["unexpected_keys"]),
        "Misshapen": [
            f"{name} {tuple(found)}, expected {tuple(expected)}"
            for name, found, expected in sorted(info["mismatched_keys"])
        ],
    }
    if not any(problems.values()):
        return
    lines = ["The checkpoint's tensors are not those of its configuration, so it is not loaded."]
    if head_type == "none" and any(name.startswith(_HEAD_TENSORS) for name in problems["Unexpected"]):
        lines.append(
            "It holds the tensors of a Domino head but its projector_type says plain DFlash: set "
            'dflash_config.projector_type to "domino" (and shift_label to what it was trained with).'
        )
    for problem, names in problems.items():
        if names:
            lines.append(f"{problem}: {'; '.join(names[:12])}{' ...' if len(names) > 12 else ''}.")
    raise ValueError(" ".join(lines))
