"""The light causal head: what the drafted prefix says about the next token, as a low-rank correction of its logits.

A head is a prefix encoder and a [`LowRankCorrection`]. Both prefix encoders offer the same four methods: `encode` (a
whole block, teacher-forced: training) and `start` / `step` / `select` (one more token for each of N prefixes, and the
choice of the prefixes to go on with). Drafting steps through `GRUSteps` and `AttentionSteps`, which merge products.
Tests hold that all three are equal.

Source: arXiv:2605.29707, section 3.2 (GRU form) and 3.3 (attention form); shape letters as in README's "Design".
"""

from typing import Any

import torch
from torch import nn
from transformers import DynamicCache
from transformers.models.qwen3.configuration_qwen3 import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer, Qwen3RMSNorm, Qwen3RotaryEmbedding

from .configuration_domino import DominoConfig
from .packing_domino import MakeProduct


class PrefixGRU(nn.GRU):
    """One GRU layer without bias over the embeddings of anchor and drafts (gate order r, z, n)."""

    weight_ih_l0: torch.Tensor
    weight_hh_l0: torch.Tensor

    def __init__(self, config: DominoConfig):
        super().__init__(config.hidden_size, config.head_hidden_size, batch_first=True, bias=False)

    def encode(self, embeds_NKH: torch.Tensor, hidden_NKH: torch.Tensor) -> torch.Tensor:
        """States after each of the K tokens, `[N, K, G]`. `hidden_NKH` is not read: a GRU sees tokens only."""
        start = embeds_NKH.new_zeros(1, embeds_NKH.shape[0], self.hidden_size)
        # Not super().forward: its flat weight list would pass by weights that PEFT has parametrised.
        weights = [self.weight_ih_l0, self.weight_hh_l0]
        return torch.gru(embeds_NKH, start, weights, False, 1, 0.0, False, False, True)[0]

    def start(self, num_prefixes: int) -> torch.Tensor:
        return self.weight_hh_l0.new_zeros(num_prefixes, self.hidden_size)

    def step(
        self, embeds_NH: torch.Tensor, hidden_NH: torch.Tensor, state_NG: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Reads one more token per prefix. Returns the states `[N, G]`, as output and as memory."""
        state_NG = torch.gru_cell(embeds_NH, state_NG, self.weight_ih_l0, self.weight_hh_l0)
        return state_NG, state_NG

    def select(self, state_NG: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        return state_NG[rows]


class PrefixAttention(nn.Module):
    """A causal decoder layer of width G over the pairs (block state, token embedding) of anchor and drafts.

    Its key/value memory spans the block only; positions are those within the block.
    """

    def __init__(self, config: DominoConfig):
        super().__init__()
        width = config.head_hidden_size
        layer_config = Qwen3Config(
            hidden_size=width,
            intermediate_size=2 * width,
            num_hidden_layers=1,
            num_attention_heads=width // 32,
            num_key_value_heads=width // 32,
            head_dim=32,
            rms_norm_eps=config.rms_norm_eps,
            attn_implementation="sdpa",  # type: ignore[call-arg]
        )
        self.hidden_size = width
        self.in_proj = nn.Linear(2 * config.hidden_size, width, bias=False)
        self.layer = Qwen3DecoderLayer(layer_config, layer_idx=0)
        self.norm = Qwen3RMSNorm(width, eps=config.rms_norm_eps)
        self.rotary_emb = Qwen3RotaryEmbedding(layer_config)

    def encode(self, embeds_NKH: torch.Tensor, hidden_NKH: torch.Tensor) -> torch.Tensor:
        """Outputs at each of the K tokens, `[N, K, G]`."""
        return self._run(embeds_NKH, hidden_NKH, None)

    def start(self, num_prefixes: int) -> DynamicCache:
        return DynamicCache()

    def step(
        self, embeds_NH: torch.Tensor, hidden_NH: torch.Tensor, state: DynamicCache
    ) -> tuple[torch.Tensor, DynamicCache]:
        """Reads one more token per prefix. Returns the outputs `[N, G]` and the memory."""
        return self._run(embeds_NH[:, None], hidden_NH[:, None], state)[:, 0], state

    def select(self, state: DynamicCache, rows: torch.Tensor) -> DynamicCache:
        state.batch_select_indices(rows)
        return state

    def _run(self, embeds: torch.Tensor, hidden: torch.Tensor, memory: DynamicCache | None) -> torch.Tensor:
        inputs = self.in_proj(torch.cat([hidden, embeds], dim=-1))
        first = 0 if memory is None else memory.get_seq_length()
        positions = torch.arange(first, first + inputs.shape[1], device=inputs.device)[None]
        # No mask: sdpa is causal over a whole block, and one query sees all of the memory.
        outputs = self.layer(
            inputs, attention_mask=None, cache=memory, position_embeddings=self.rotary_emb(inputs, positions)
        )
        return self.norm(outputs)


class GRUSteps:
    """The GRU head while drafting: `PrefixGRU.step` and what its state adds to the correction's features.

    All that reads the state comes from one product a token: the gates of the token after, reset and update `[N, 2G]`
    and new `[N, G]`, and the features now `[N, R]`. Memory of N prefixes: their states `[N, G]`, that product, and
    these parts of it.
    """

    def __init__(self, encoder: PrefixGRU, state_in_RG: torch.Tensor, make_product: MakeProduct):
        self._from_token = make_product(encoder.weight_ih_l0)
        self._from_state = make_product(torch.cat([encoder.weight_hh_l0, state_in_RG]))
        size = encoder.hidden_size
        self._gates, self._parts = [2 * size, size], [2 * size, size, state_in_RG.shape[0]]

    def start(self, num_prefixes: int, like: torch.Tensor) -> tuple[torch.Tensor, ...]:
        product = like.new_zeros(num_prefixes, sum(self._parts))
        parts = product.split(self._parts, dim=1)
        return parts[1], product, *parts  # a new state is as wide as the new gate, and zero, too

    def step(
        self, embeds_NH: torch.Tensor, hidden_NH: torch.Tensor, memory: tuple[torch.Tensor, ...]
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        """Reads one more token per prefix. Returns `W1`'s product with the new states `[N, R]`, and the memory."""
        state, _, state_gates, state_new, _ = memory
        gates, new = self._from_token(embeds_NH).split(self._gates, dim=1)
        reset, update = (gates + state_gates).sigmoid_().chunk(2, dim=1)
        state = torch.lerp(torch.addcmul(new, reset, state_new).tanh_(), state, update)
        memory = self._memory(state, self._from_state(state))
        return memory[-1], memory

    def select(self, memory: tuple[torch.Tensor, ...], rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return self._memory(*(part.index_select(0, rows) for part in memory[:2]))

    def _memory(self, state: torch.Tensor, product: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return state, product, *product.split(self._parts, dim=1)


class AttentionSteps:
    """The attention head while drafting, with the same methods as `GRUSteps`."""

    def __init__(self, encoder: PrefixAttention, state_in_RG: torch.Tensor, make_product: MakeProduct):
        self._encoder = encoder
        self._dtype = encoder.norm.weight.dtype
        self._from_state = make_product(state_in_RG)

    def start(self, num_prefixes: int, like: torch.Tensor) -> DynamicCache:
        return self._encoder.start(num_prefixes)

    def step(
        self, embeds_NH: torch.Tensor, hidden_NH: torch.Tensor, memory: DynamicCache
    ) -> tuple[torch.Tensor, DynamicCache]:
        embeds = embeds_NH.to(self._dtype)
        output, memory = self._encoder.step(embeds, hidden_NH.to(self._dtype).expand_as(embeds), memory)
        return self._from_state(output.to(embeds_NH.dtype)), memory

    def select(self, memory: DynamicCache, rows: torch.Tensor) -> DynamicCache:
        return self._encoder.select(memory, rows)


PREFIX_ENCODERS: dict[str, tuple[str, Any]] = {
    "gru": ("prefix_gru", PrefixGRU),
    "attention": ("prefix_attention", PrefixAttention),
}


class LowRankCorrection(nn.Sequential):
    """`W2 · SiLU(W1 · [z ; s])`, to be added to the base logits. W1: (H+G) -> R, W2: R -> V (or Vd), no bias."""

    def __init__(self, config: DominoConfig):
        super().__init__(
            nn.Linear(config.hidden_size + config.head_hidden_size, config.head_rank, bias=False),
            nn.SiLU(),
            nn.Linear(config.head_rank, config.draft_vocab_size or config.vocab_size, bias=False),
        )

    def features(self, hidden: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        """`SiLU(W1 · [z ; s])`, `[..., R]`: what the last matrix is applied to."""
        return self[1](self[0](torch.cat([hidden, state], dim=-1)))


class DraftingHead:
    """A head while drafting: its steps, and the correction's first matrix split into what reads block state and prefix.

    Args:
        encoder: the drafter's prefix encoder.
        first: the correction's first matrix, `[R, H+G]` (see `effective_weight`).
        make_product: makes a product of a weight.
    """

    def __init__(self, encoder: Any, first: torch.Tensor, make_product: MakeProduct):
        hidden_in, state_in = first.split([first.shape[1] - encoder.hidden_size, encoder.hidden_size], dim=1)
        steps: Any = GRUSteps if _is_gru(encoder) else AttentionSteps
        self.steps: GRUSteps | AttentionSteps = steps(encoder, state_in, make_product)
        self._from_hidden = make_product(hidden_in)

    @staticmethod
    def sources(encoder: Any) -> list[torch.Tensor]:
        """The encoder's weights that are copied here, as they are now."""
        return [encoder.weight_ih_l0, encoder.weight_hh_l0] if _is_gru(encoder) else []

    def from_hidden(self, hidden_BJH: torch.Tensor) -> torch.Tensor:
        """The block states' part of the correction's features, for all positions `[B, J, R]`."""
        return self._from_hidden(hidden_BJH.flatten(0, 1)).view(*hidden_BJH.shape[:2], -1)


def _is_gru(encoder: Any) -> bool:
    """Seen through PEFT's `modules_to_save`, which hands out the active copy's attributes.

    Raises:
        ValueError: PEFT adapts the encoder inside its wrapper's `forward` only, which drafting does not call.
    """
    if not hasattr(encoder, "step"):
        raise ValueError(
            "An adapter reaches the drafter's GRU by PEFT's target_parameters, which work in `forward` alone, and a "
            'drafter runs its GRU step by step. Train the GRU whole: modules_to_save=["prefix_gru"].'
        )
    return hasattr(encoder, "weight_ih_l0")


def effective_weight(linear: nn.Module) -> torch.Tensor:
    """The matrix `[out, in]` that a linear layer applies, adapters included.

    PEFT's layers keep the base weight in `.weight` and add theirs in `forward`: only applying the layer shows both.
    """
    if type(linear) is nn.Linear:
        return linear.weight
    with torch.no_grad():
        return linear(torch.eye(linear.in_features, dtype=linear.weight.dtype, device=linear.weight.device)).T
