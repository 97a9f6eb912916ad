"""Tiny models for tests: targets of several families whose greedy text varies, and drafters for them.

All weights come from seeds, so a factory called twice with the same arguments gives the same model.
"""

from typing import Any

import torch
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from hf_domino import DominoConfig, DominoDraftModel
from hf_domino.drafter.target_domino import Target
from hf_domino.training.blocks import block_states

VOCAB_SIZE = 61
PAD, EOS, BOS = 0, 1, 2

_SHAPE: dict[str, Any] = dict(
    vocab_size=VOCAB_SIZE,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=512,
    initializer_range=0.4,  # far from the usual 0.02: greedy text then varies with its context
    eos_token_id=EOS,
    bos_token_id=BOS,
    pad_token_id=PAD,
    tie_word_embeddings=False,
)

FAMILIES: dict[str, tuple[type, type, dict[str, Any]]] = {
    "llama": (LlamaConfig, LlamaForCausalLM, {}),
    "llama_tied": (LlamaConfig, LlamaForCausalLM, {"tie_word_embeddings": True}),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, {}),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, {}),
    "qwen3_tied": (Qwen3Config, Qwen3ForCausalLM, {"tie_word_embeddings": True}),
    "mistral_sliding": (MistralConfig, MistralForCausalLM, {"sliding_window": 12}),
    # Embeddings scaled by sqrt(H) inside the model, sliding and full layers with a RoPE each.
    "gemma3": (
        Gemma3TextConfig,
        Gemma3ForCausalLM,
        {
            "sliding_window": 12,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
            "query_pre_attn_scalar": 8,
        },
    ),
}


def tiny_target(family: str = "llama", seed: int = 0, context: float = 0.03, **overrides: Any) -> PreTrainedModel:
    """A random, frozen target in float32.

    Args:
        context: scales what the layers add to the embedding. Below 1 the last token decides more, so that the text
            can be drafted; at 1 it is chaotic.
    """
    config_class, model_class, specific = FAMILIES[family]
    shape = {key: value for key, value in _SHAPE.items() if not (family == "qwen2" and key == "head_dim")}
    torch.manual_seed(seed)
    target = model_class(config_class(**(shape | specific | overrides))).eval().requires_grad_(False)
    for name, parameter in target.named_parameters():
        if name.endswith(("o_proj.weight", "down_proj.weight", "feedforward_layernorm.weight")):
            parameter.mul_(context)
    target.generation_config.eos_token_id = target.config.eos_token_id
    target.generation_config.pad_token_id = target.config.pad_token_id
    return target


def skilled_drafter(target: PreTrainedModel, head_type: str = "gru", **overrides: Any) -> DominoDraftModel:
    """A drafter whose drafts are often accepted (see `fit_head`), for a target with a weak context."""
    fields = dict(initializer_range=0.05, head_rank=96, pure_draft_prefix_len=0)
    drafter = tiny_drafter(target, head_type, **(fields | overrides))
    torch.nn.init.normal_(drafter.embed_proj[0].weight, std=0.3)
    for parameter in drafter.prefix_encoder.parameters():
        if parameter.ndim == 2:
            torch.nn.init.normal_(parameter, std=0.3)
    fit_head(drafter, target)
    return drafter


def tiny_drafter(target: PreTrainedModel, head_type: str = "gru", seed: int = 1, **overrides: Any) -> DominoDraftModel:
    """A random drafter in float32, in eval mode. Its head's last matrix is random too, so that the head matters."""
    fields = dict(
        block_size=6,
        num_hidden_layers=2,
        head_rank=8,
        head_hidden_size=32,
        initializer_range=0.3,
        candidate_pool_size=None,
    )
    config = DominoConfig.for_target(target.config, head_type=head_type, **(fields | overrides))
    torch.manual_seed(seed)
    drafter = DominoDraftModel(config).eval()
    if head_type != "none":
        torch.nn.init.normal_(drafter.embed_proj[2].weight, std=1.0)
    return drafter


def prompt_ids(length: int, seed: int = 0, vocab_size: int = VOCAB_SIZE, batch: int = 1) -> torch.Tensor:
    """A random prompt `[batch, length]` without special tokens."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, vocab_size - 1, (batch, length), generator=generator)


@torch.no_grad()
def fit_head(drafter: DominoDraftModel, target: PreTrainedModel, sequences: int = 48, length: int = 24) -> None:
    """Fits the head's last matrix to the target's logits on its own greedy text, by one ridge regression.

    Takes milliseconds, and a target with a weak context is then drafted well enough for many acceptances.
    """
    config, view, like = drafter.config, Target(target, drafter.config), drafter.fc.weight
    text = prompt_ids(3, 1234, config.vocab_size, batch=sequences)
    text = plain_text(target, text, max_new_tokens=length, eos_token_id=None)
    outputs = target(text, output_hidden_states=True, use_cache=False)
    anchors = torch.arange(2, text.shape[1] - config.max_drafts, 3).expand(sequences, -1)
    positions = anchors[..., None] + torch.arange(config.max_drafts)
    rows = torch.arange(sequences)[:, None, None]
    embeds = view.embed(text[rows, positions], like)
    mask_embed = view.embed(torch.tensor(config.mask_token_id), like)
    states = block_states(
        drafter, view.tapped_states(outputs.hidden_states), embeds[:, :, 0], mask_embed, anchors, config.block_size
    )[:, :, config.row_offset :].flatten(0, 1)
    encoded = drafter.prefix_encoder.encode(embeds.flatten(0, 1), states)
    features = drafter.embed_proj.features(states, encoded).flatten(0, 1)
    wanted = outputs.logits[rows, positions].flatten(0, 2) - view.base_logits(states).flatten(0, 1)
    gram = features.T @ features + 1e-3 * torch.eye(config.head_rank)
    drafter.embed_proj[2].weight.copy_(torch.linalg.solve(gram, features.T @ wanted).T)


def plain_text(target: PreTrainedModel, ids: torch.Tensor, **arguments: Any) -> torch.Tensor:
    """What `generate` gives without a drafter."""
    return target.generate(ids, attention_mask=torch.ones_like(ids), **({"do_sample": False} | arguments))


def drafted_text(target: PreTrainedModel, drafter: DominoDraftModel, ids: torch.Tensor, **arguments: Any):
    """What `generate` gives with one."""
    return plain_text(target, ids, assistant_model=drafter, **arguments)
