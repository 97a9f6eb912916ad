"""Configuration of a Domino drafter: one clean, strict set of fields; the layout on disk is checkpoint_domino's."""

from typing import Any, Literal

from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig
from transformers.generation import GenerationConfig
from transformers.models.qwen3.configuration_qwen3 import Qwen3Config

from .checkpoint_domino import community_config, drafter_fields

# What PreTrainedConfig itself takes beyond its declared fields. Everything else is a misspelt field.
_BASE_KWARGS = {
    "attn_implementation",
    "auto_map",
    "experts_implementation",
    "model_type",
    "name_or_path",
    "num_labels",
    "output_attentions",
    "partial_rotary_factor",
    "quantization_config",
    "rope_scaling",
    "rope_theta",
    "tie_last_hidden_states",
    "torch_dtype",
}

# Far above any drafter, low enough that a hostile config.json costs nothing to refuse.
_LARGEST = {
    "num_hidden_layers": 256,
    "hidden_size": 2**17,
    "intermediate_size": 2**20,
    "num_attention_heads": 2**12,
    "num_key_value_heads": 2**12,
    "head_dim": 2**12,
    "vocab_size": 2**22,
    "block_size": 2**12,
    "head_rank": 2**16,
    "head_hidden_size": 2**16,
    "max_tree_nodes": 2**16,
}


def spread_taps(num_target_layers: int, num_taps: int = 5) -> list[int]:
    """Layer ids spread evenly from the second to the third-last layer of the target, as DFlash publishes them.

    Targets too shallow for that use their whole depth, and as many taps as they have layers.
    """
    num_taps = min(num_taps, num_target_layers)
    first, last = 1, num_target_layers - 3
    if last - first + 1 < num_taps:
        first, last = 0, num_target_layers - 1
    if num_taps == 1:
        return [last]
    return [int(first + i * (last - first) / (num_taps - 1) + 0.5) for i in range(num_taps)]


@strict
class DominoConfig(Qwen3Config):
    """Shape and conventions of a Domino drafter.

    Backbone fields are those of [`Qwen3Config`]. The fields below are Domino's (arXiv:2605.29707, section 3).

    Args:
        num_target_layers: depth of the target model.
        target_layer_ids: the M tapped layers, 0-based; layer i is entry i + 1 of the target's `hidden_states`.
        mask_token_id: the token whose embedding fills the rows of the block after the anchor.
        block_size: K, rows of a block, the anchor's included.
        shift_label: true: row k predicts the token after it (K drafts); false, as DFlash: row k >= 1 predicts the
            token at its own place (K - 1 drafts).
        head_type: `gru` (as published), `attention` (a causal decoder layer over the drafted prefix), or `none`
            (plain DFlash).
        head_rank: R, rank of the head's correction of the logits.
        head_hidden_size: G, width of the head's state.
        pure_draft_prefix_len: the first drafts of a block that use the backbone's logits alone.
        candidate_pool_size: tokens per position that the head rescores, the backbone's best; `None`: all V.
        draft_vocab_size: Vd, how many tokens the drafter proposes (see `vocabulary_domino`); `None`: all V.
        max_tree_nodes: the most draft tokens verified in one forward of the target.
        max_tree_width: the most of them at one depth, of the drafter's own; 1: a chain; `None`: as many as pay.
        draft_sources: `both`, or only the `drafter`, or only the `text` (continuations of n-grams found before).
        context_window: the most context positions that the drafter keeps; `None`: all of them.
        target_name: the target that the drafter was trained for.
        target_fingerprint: coarse fingerprint of the target's embedding (see `target_domino.fingerprint`).

    Raises:
        StrictDataclassError: a field of the wrong type or out of range; the message names it.
        ValueError: a misspelt field.
    """

    model_type = "domino"

    num_hidden_layers: int = 5
    num_target_layers: int = 36
    target_layer_ids: list[int] | None = None
    mask_token_id: int = 151669
    block_size: int = 16
    shift_label: bool = True
    head_type: Literal["gru", "attention", "none"] = "gru"
    head_rank: int = 256
    head_hidden_size: int = 1024
    pure_draft_prefix_len: int = 1
    candidate_pool_size: int | None = 32
    draft_vocab_size: int | None = None
    max_tree_nodes: int = 16
    max_tree_width: int | None = None
    draft_sources: Literal["both", "drafter", "text"] = "both"
    context_window: int | None = None
    target_name: str | None = None
    target_fingerprint: list[float] | None = None

    def __post_init__(self, **kwargs):
        known = _BASE_KWARGS | set(GenerationConfig._get_default_generation_params())
        unknown = sorted(name for name in kwargs if name not in known and not name.startswith("_"))
        if unknown:
            raise ValueError(f"DominoConfig has no field {', '.join(map(repr, unknown))}; check the spelling.")
        absurd = [
            f"{name} {value}"
            for name, limit in _LARGEST.items()
            if isinstance(value := getattr(self, name), int) and value > limit
        ]
        if absurd:
            raise ValueError(f"No drafter has {', '.join(absurd)}: this configuration is damaged or hostile.")
        if self.target_layer_ids is None:
            self.target_layer_ids = spread_taps(self.num_target_layers)
        if "sliding_attention" in (self.layer_types or ()):
            # Qwen3Config would drop the window of layers that are named sliding while the flag is left off.
            self.use_sliding_window = True
        super().__post_init__(**kwargs)

    @property
    def row_offset(self) -> int:
        """Draft j (0-based) is read from block row j + row_offset."""
        return 0 if self.shift_label else 1

    @property
    def max_drafts(self) -> int:
        """J, the draft tokens that one block gives."""
        return self.block_size - self.row_offset

    def validate_block(self):
        """Part of `@strict`'s validation."""
        if self.block_size < 2:
            raise ValueError(f"block_size must be at least 2 (the anchor and one more row), got {self.block_size}.")
        if not 0 <= self.mask_token_id < self.vocab_size:
            raise ValueError(
                f"mask_token_id {self.mask_token_id} lies outside the vocabulary of {self.vocab_size} tokens."
            )
        eos = self.eos_token_id if isinstance(self.eos_token_id, list) else [self.eos_token_id]
        if self.mask_token_id in eos:
            raise ValueError(
                f"mask_token_id {self.mask_token_id} is also eos_token_id; choose a token that text never holds."
            )

    def validate_window(self):
        """Part of `@strict`'s validation."""
        if "sliding_attention" in self.layer_types and not self.sliding_window:
            raise ValueError("layer_types has sliding_attention, which needs a sliding_window of at least 1.")

    def validate_taps(self):
        """Part of `@strict`'s validation."""
        taps = self.target_layer_ids or []
        wrong = [i for i in taps if not 0 <= i < self.num_target_layers]
        if wrong:
            raise ValueError(
                f"target_layer_ids {wrong} lie outside the target's {self.num_target_layers} layers "
                f"(0 to {self.num_target_layers - 1})."
            )
        if not taps or sorted(set(taps)) != list(taps):
            raise ValueError(f"target_layer_ids must be ascending, without repeats and not empty, got {taps}.")

    def validate_head(self):
        """Part of `@strict`'s validation."""
        if self.tie_word_embeddings:
            raise ValueError("tie_word_embeddings must be false: a drafter has no embeddings of its own to tie.")
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads ({self.num_attention_heads}) must be a multiple of num_key_value_heads "
                f"({self.num_key_value_heads})."
            )
        for name in ("head_rank", "head_hidden_size", "max_tree_nodes", "num_hidden_layers"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}.")
        if self.draft_vocab_size is not None and not 1 <= self.draft_vocab_size <= self.vocab_size:
            raise ValueError(
                f"draft_vocab_size must be None or between 1 and vocab_size {self.vocab_size}, got "
                f"{self.draft_vocab_size}."
            )
        for name in ("candidate_pool_size", "context_window", "max_tree_width"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise ValueError(f"{name} must be None or at least 1, got {getattr(self, name)}.")
        if self.pure_draft_prefix_len < 0:
            raise ValueError(f"pure_draft_prefix_len must not be negative, got {self.pure_draft_prefix_len}.")
        if self.head_type == "attention" and self.head_hidden_size % 32:
            raise ValueError(
                f"head_hidden_size must be a multiple of 32 for the attention head, got {self.head_hidden_size}."
            )

    @classmethod
    def for_target(
        cls,
        target_config: PreTrainedConfig,
        head_type: str = "gru",
        block_size: int = 16,
        num_hidden_layers: int = 5,
        target_layer_ids: list[int] | None = None,
        mask_token_id: int | None = None,
        **overrides: Any,
    ) -> "DominoConfig":
        """A valid configuration for a target: widths, heads, RoPE, vocabulary and special ids are the target's.

        Args:
            target_config: configuration of the target, or of a composite model that holds one.
            mask_token_id: a token that the target's text never holds; by default the last of the vocabulary that is
                not a special token of the configuration.
            overrides: any other field.

        Raises:
            ValueError: the target is not a decoder-only text model, or a field does not fit.
        """
        text = target_config.get_text_config()
        if target_config.is_encoder_decoder:
            raise ValueError("Domino drafts for decoder-only models; this target is an encoder-decoder.")
        missing = [
            n
            for n in ("hidden_size", "num_hidden_layers", "vocab_size", "num_attention_heads")
            if not isinstance(getattr(text, n, None), int)
        ]
        if missing:
            raise ValueError(f"The target's configuration ({text.model_type}) lacks {', '.join(missing)}.")
        heads = text.num_attention_heads
        special = {"eos_token_id", "pad_token_id", "bos_token_id"}
        ids = {name: getattr(text, name, None) for name in special}
        if mask_token_id is None:
            taken = {i for v in ids.values() for i in (v if isinstance(v, list) else [v])}
            mask_token_id = next(i for i in range(text.vocab_size - 1, -1, -1) if i not in taken)
        fields = dict(
            vocab_size=text.vocab_size,
            hidden_size=text.hidden_size,
            intermediate_size=getattr(text, "intermediate_size", None) or 4 * text.hidden_size,
            num_attention_heads=heads,
            num_key_value_heads=getattr(text, "num_key_value_heads", None) or heads,
            head_dim=getattr(text, "head_dim", None) or text.hidden_size // heads,
            rms_norm_eps=getattr(text, "rms_norm_eps", None) or 1e-6,
            max_position_embeddings=getattr(text, "max_position_embeddings", None) or 32768,
            initializer_range=getattr(text, "initializer_range", None) or 0.02,
            rope_parameters=_global_rope(text),
            tie_word_embeddings=False,
            num_target_layers=text.num_hidden_layers,
            target_layer_ids=target_layer_ids,
            num_hidden_layers=num_hidden_layers,
            block_size=block_size,
            head_type=head_type,
            mask_token_id=mask_token_id,
            target_name=getattr(target_config, "_name_or_path", None) or None,
            **ids,
        )
        return cls(**(fields | overrides))

    @classmethod
    def get_config_dict(cls, *args, **kwargs) -> tuple[dict[str, Any], dict[str, Any]]:
        """As for any configuration; community checkpoints name their model type "qwen3", which is no mistake."""
        config_dict, kwargs = super().get_config_dict(*args, **kwargs)
        if "dflash_config" in config_dict:
            config_dict = {**config_dict, "model_type": cls.model_type}
        return config_dict, kwargs

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs) -> "DominoConfig":
        """Reads the community's layout as well as our own fields (see checkpoint_domino)."""
        return super().from_dict(drafter_fields(config_dict), **kwargs)

    def to_dict(self) -> dict[str, Any]:
        """The community's layout: what `config.json` holds."""
        return community_config(super().to_dict())

    def to_diff_dict(self) -> dict[str, Any]:
        # Nothing is left to a runtime's defaults: they differ between runtimes (shift_label, rope_theta).
        output = self.to_dict()
        output.pop("_name_or_path", None)
        return output


def _global_rope(text_config: PreTrainedConfig) -> dict[str, Any]:
    """RoPE parameters of the target's full-attention layers."""
    rope = getattr(text_config, "rope_parameters", None) or {}
    rope = rope.get("full_attention", rope)
    theta = rope.get("rope_theta") or getattr(text_config, "rope_theta", None) or 10000.0
    return {**rope, "rope_theta": theta, "rope_type": rope.get("rope_type", "default")}
