"""The parallel backbone and `DominoDraftModel`, the model that users load, train and pass to `generate`.

Source: arXiv:2605.29707, section 3.1; the backbone is DFlash's (arXiv:2602.06036). Layers, attention and rotary
embedding are transformers' Qwen3 ones; a drafter has no embeddings and no output head of its own.
"""

import json
import os
from typing import TYPE_CHECKING, Any

import torch
from huggingface_hub import save_torch_state_dict
from torch import nn
from transformers import GenerationConfig, PreTrainedModel
from transformers.models.qwen3.modeling_qwen3 import (
    Qwen3Attention,
    Qwen3DecoderLayer,
    Qwen3RMSNorm,
    Qwen3RotaryEmbedding,
    rotate_half,
)
from transformers.utils import CONFIG_NAME

from .checkpoint_domino import TENSOR_PREFIXES, check_loading, check_weight_files, engine_config
from .configuration_domino import DominoConfig
from .context_domino import ContextMemory
from .head_domino import PREFIX_ENCODERS, LowRankCorrection
from .integration_domino import install
from .vocabulary_domino import buffers_from_tokens, check_buffers, token_ids

if TYPE_CHECKING:
    from .candidate_generator_domino import DominoCandidateGenerator, DraftingStats


class DominoRotaryEmbedding(Qwen3RotaryEmbedding):
    """Keeps its frequencies in float32 when the model is cast: rounded ones turn far positions by whole radians."""

    def _apply(self, fn, recurse=True):
        exact = self.inv_freq
        super()._apply(fn, recurse)
        if self.inv_freq.dtype != exact.dtype:
            self.inv_freq = exact.to(self.inv_freq.device)  # type: ignore[assignment]
            self.original_inv_freq = self.inv_freq.clone()  # type: ignore[assignment]
        return self


class DominoAttention(Qwen3Attention):
    """Queries from the block; keys and values from the context and, in both directions, the block."""

    def __init__(self, config: DominoConfig, layer_idx: int):
        super().__init__(config, layer_idx)
        self.is_causal = False

    def project_context(
        self, context_BSH: torch.Tensor, position_embeddings: tuple[torch.Tensor, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Rotated keys and values `[B, heads, S, head_dim]` of context positions."""
        shape = (*context_BSH.shape[:-1], -1, self.head_dim)
        keys = self.k_norm(self.k_proj(context_BSH).view(shape)).transpose(1, 2)
        values = self.v_proj(context_BSH).view(shape).transpose(1, 2)
        cos, sin = (part.unsqueeze(1) for part in position_embeddings)
        return keys * cos + rotate_half(keys) * sin, values


class DominoLayer(Qwen3DecoderLayer):
    # A checkpointed layer runs twice, and both times the context gives it the same keys and values.
    _can_checkpoint_with_cache = True

    def __init__(self, config: DominoConfig, layer_idx: int):
        super().__init__(config, layer_idx)
        self.self_attn = DominoAttention(config, layer_idx)


class DominoDraftModel(PreTrainedModel):
    """A Domino drafter for one target model.

    ```python
    drafter = DominoDraftModel.from_pretrained("Huang2020/Qwen3-8B-Domino-b16", dtype="auto")
    model.generate(**inputs, assistant_model=drafter)
    ```
    """

    config: DominoConfig
    config_class = DominoConfig
    base_model_prefix = "drafter"
    main_input_name = "block_embeds"
    supports_gradient_checkpointing = True
    _no_split_modules = ["DominoLayer"]
    _supports_flash_attn = True
    _supports_sdpa = True
    _supports_flex_attn = True
    _supports_attention_backend = True

    def __init__(self, config: DominoConfig):
        super().__init__(config)
        hidden = config.hidden_size
        self.fc = nn.Linear(len(config.target_layer_ids) * hidden, hidden, bias=False)
        self.hidden_norm = Qwen3RMSNorm(hidden, eps=config.rms_norm_eps)
        self.layers = nn.ModuleList(DominoLayer(config, i) for i in range(config.num_hidden_layers))
        self.norm = Qwen3RMSNorm(hidden, eps=config.rms_norm_eps)
        self.rotary_emb = DominoRotaryEmbedding(config)
        if config.head_type != "none":
            # At the root, not inside a head module: these are the community's tensor names.
            name, encoder = PREFIX_ENCODERS[config.head_type]
            setattr(self, name, encoder(config))
            self.embed_proj = LowRankCorrection(config)
        if config.draft_vocab_size is not None:
            self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.long))
            self.register_buffer("t2d", torch.arange(config.vocab_size) < config.draft_vocab_size)
        self.gradient_checkpointing = False
        self.drafting_stats: DraftingStats | None = None  # of the last `generate`
        self.use_tree = True  # false: transformers' own assisted loop, one chain
        # Read by transformers' pipelines, and by us for num_assistant_tokens and its schedule.
        self.generation_config = GenerationConfig()
        self.post_init()

    @property
    def prefix_encoder(self) -> nn.Module | None:
        """The head's prefix encoder, or `None` for plain DFlash."""
        if self.config.head_type == "none":
            return None
        return getattr(self, PREFIX_ENCODERS[self.config.head_type][0])

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, nn.GRU):
            nn.init.xavier_uniform_(module.weight_ih_l0)
            nn.init.orthogonal_(module.weight_hh_l0)
        elif hasattr(self, "embed_proj") and module is self.embed_proj[2]:
            # An untrained head corrects nothing. (transformers asks only for modules that hold weights themselves.)
            nn.init.zeros_(module.weight)

    @property
    def draft_token_ids(self) -> torch.Tensor | None:
        """The tokens that this drafter proposes, `[Vd]`, or `None` for all of the vocabulary."""
        return None if self.config.draft_vocab_size is None else token_ids(self.d2t)

    @torch.no_grad()
    def restrict_vocabulary(self, tokens: torch.Tensor) -> None:
        """Restricts the drafter to a draft vocabulary, for good: the head's last matrix keeps only these rows.

        Args:
            tokens: distinct token ids, `[Vd]`.

        Raises:
            ValueError: ids are repeated or outside the vocabulary, or the drafter is restricted already.
        """
        if self.config.draft_vocab_size is not None:
            raise ValueError(f"This drafter has a draft vocabulary of {self.config.draft_vocab_size} tokens already.")
        d2t, t2d = buffers_from_tokens(tokens.cpu(), self.config.vocab_size)
        self.config.draft_vocab_size = d2t.numel()
        self.register_buffer("d2t", d2t.to(self.device))
        self.register_buffer("t2d", t2d.to(self.device))
        if self.config.head_type != "none":
            last: Any = self.embed_proj[2]
            last.weight = nn.Parameter(last.weight[self.draft_token_ids].clone())
            last.out_features = d2t.numel()

    def project_context(self, tapped_BST: torch.Tensor) -> torch.Tensor:
        """The target's tapped states, concatenated `[B, S, M·H]`, as the drafter's context `[B, S, H]`."""
        return self.hidden_norm(self.fc(tapped_BST))

    def context_keys_values(
        self, tapped_BST: torch.Tensor, position_ids_BS: torch.Tensor
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Per layer, the keys and values `[B, heads, S, head_dim]` of context positions."""
        context = self.project_context(tapped_BST)
        position_embeddings = self.rotary_emb(context, position_ids_BS)
        return [layer.self_attn.project_context(context, position_embeddings) for layer in self.layers]

    def forward(
        self,
        block_embeds: torch.Tensor,
        position_ids: torch.Tensor,
        context: "ContextMemory | Any",
        attention_mask: dict[str, torch.Tensor | None] | None = None,
    ) -> torch.Tensor:
        """The backbone over blocks.

        Args:
            block_embeds: raw target embeddings of anchor and masks `[B, K, H]` (any number of blocks packed in K,
                if the mask keeps them apart).
            position_ids: absolute positions `[B, K]`.
            context: gives each layer the context's keys and values before the block's (`update`).
            attention_mask: additive mask per layer type, or `None` where all is visible.

        Returns:
            The block states z `[B, K, H]`, normalised: ready for the target's output head.
        """
        attention_mask = attention_mask or {}
        position_embeddings = self.rotary_emb(block_embeds, position_ids)
        hidden_BKH = block_embeds
        for layer, layer_type in zip(self.layers, self.config.layer_types, strict=True):
            hidden_BKH = layer(
                hidden_BKH,
                attention_mask=attention_mask.get(layer_type),
                position_ids=position_ids,
                position_embeddings=position_embeddings,
                cache=context,
            )
        return self.norm(hidden_BKH)

    def create_candidate_generator(self, target: PreTrainedModel, **kwargs) -> "DominoCandidateGenerator":
        """What the hook in `integration_domino` asks an assistant model for."""
        from .candidate_generator_domino import DominoCandidateGenerator

        return DominoCandidateGenerator(self, target, **kwargs)

    def decode_for(self, target: PreTrainedModel, input_ids: torch.Tensor, **arguments: Any) -> Any | None:
        """Our decoding loop for one `generate` call of the target, or `None` where transformers' own has to run.

        A method of the drafter, so that a drafter from a Hub repo runs its own copy of the loop whichever copy of the
        hook is installed.
        """
        from .decoding_domino import domino_decoding, loop_applies

        if not self.use_tree or not loop_applies(target, input_ids, **arguments):
            return None
        return domino_decoding(target, self, input_ids, **arguments)

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path, *args, output_loading_info: bool = False, **kwargs):
        """As for any model, but a tensor that is missing, left over or of another shape is an error, not a warning.

        Raises:
            ValueError: the checkpoint is not exactly the drafter that its configuration describes.
        """
        prefixes = "|".join(prefix.replace(".", r"\.") for prefix in TENSOR_PREFIXES)
        kwargs.setdefault("key_mapping", {rf"^(?:{prefixes})+": ""})
        kwargs.setdefault("use_safetensors", True)  # a pickle runs code
        loaded: Any = super().from_pretrained(
            pretrained_model_name_or_path, *args, output_loading_info=True, ignore_mismatched_sizes=True, **kwargs
        )
        model, info = loaded
        check_loading(info, model.config.head_type)
        if model.config.draft_vocab_size is not None:
            check_buffers(model.d2t, model.t2d)
        # Saved under the community's names, whatever prefixes the file had.
        model._weight_conversions = None
        return (model, info) if output_loading_info else model

    @staticmethod
    def _load_pretrained_model(model, state_dict, checkpoint_files, load_config, *args, **kwargs):
        # transformers allocates what a checkpoint lacks before it reports that; look at the files' headers first.
        if state_dict is None and not load_config.is_quantized:
            check_weight_files(checkpoint_files, model.state_dict(), model.config.head_type)
        return PreTrainedModel._load_pretrained_model(model, state_dict, checkpoint_files, load_config, *args, **kwargs)

    @classmethod
    def for_target(cls, target: PreTrainedModel, target_name: str | None = None, **kwargs) -> "DominoDraftModel":
        """The best drafter on the Hub for a target: of those that fit it, the one with the longest acceptance
        (the newest, where none is given).

        Weights are read as safetensors and no code of the repo is run; the drafter cannot change the target's output.

        Args:
            target: the target model.
            target_name: its Hub id, where it was loaded from somewhere else.
            kwargs: for `from_pretrained`; `token` is used for the search as well.

        Raises:
            LookupError: no drafter on the Hub is made for this target, or none fits it.
            ValueError: the target's Hub id is not known.
        """
        from .finding_domino import best_drafter

        found = best_drafter(target, target_name, token=kwargs.get("token"))
        return cls.from_pretrained(found.repo_id, revision=found.revision, **kwargs)

    def export_for_engines(self, folder: str, max_shard_size: str = "5GB") -> None:
        """Writes the variant that serving engines load (SGLang, vLLM, TensorRT-LLM); it loads here as well.

        Raises:
            ValueError: engines do not know this kind of head.
        """
        config = engine_config(self.config.to_dict() | {"dtype": str(self.dtype).removeprefix("torch.")})
        # Not save_pretrained: it adds auto_map and code to a drafter that was loaded from a Hub repo's code.
        os.makedirs(folder, exist_ok=True)
        save_torch_state_dict(self.state_dict(), folder, max_shard_size=max_shard_size)
        with open(os.path.join(folder, CONFIG_NAME), "w", encoding="utf-8") as file:
            json.dump(config, file, indent=2)
            file.write("\n")


# Code loaded from a Hub repo has no package whose import would do this.
install()
