"""The backbone as drafting runs it: the products of `DominoDraftModel`'s forward in fewer operators.

A draft round is small work in many operators, each of which costs its launch on a GPU and some microseconds of Python
on a CPU. Here queries, keys and values of a layer come from one product, the context's keys and values of all layers
from one, norms and rotations run on queries and keys at once. Weights are those of the model's layers; only the
attention projections are held a second time, side by side. A test holds that the result is the model's own.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm, eager_attention_forward

from .context_domino import ContextMemory
from .modeling_domino import DominoDraftModel, DominoLayer
from .packing_domino import MakeProduct


class DraftingBackbone:
    """Context projection and block forward of a drafter, as it is now.

    Args:
        drafter: one that has `plain_weights`.
        make_product: makes a product of a weight (see `packing_domino.product`).
        dtype: of the states here.
    """

    def __init__(self, drafter: DominoDraftModel, make_product: MakeProduct, dtype: torch.dtype):
        config = drafter.config
        attentions: list[Any] = [layer.self_attn for layer in drafter.layers]
        self.head_dim, self.eps, self.layer_types = attentions[0].head_dim, config.rms_norm_eps, config.layer_types
        self._config = config
        self._rotary = drafter.rotary_emb
        self._fc = make_product(drafter.fc.weight)
        self._hidden_norm, self._norm = drafter.hidden_norm.weight.to(dtype), drafter.norm.weight.to(dtype)
        both = [part.weight for attention in attentions for part in (attention.k_proj, attention.v_proj)]
        self._keys_values = make_product(torch.cat(both))
        key_norms = torch.stack([attention.k_norm.weight for attention in attentions])
        self._key_norms = key_norms.to(dtype)[:, None, None, None]
        self._layers = [_Layer(layer, make_product, dtype) for layer in drafter.layers]

    def context_keys_values(self, tapped_BST: torch.Tensor, position_ids_BS: torch.Tensor) -> torch.Tensor:
        """Keys and values of context positions, `[L, 2, B, heads, S, head_dim]` for L layers, keys rotated."""
        batch, length = tapped_BST.shape[:2]
        context = self._normed(self._fc(tapped_BST.flatten(0, 1)), self._hidden_norm)
        states = self._keys_values(context).view(batch, length, len(self._layers), 2, -1, self.head_dim)
        keys, values = states.permute(2, 3, 0, 1, 4, 5).unbind(1)
        keys = F.rms_norm(keys, (self.head_dim,), eps=self.eps) * self._key_norms
        cos, sin = self._rotation(tapped_BST, position_ids_BS)
        return torch.stack([_rotated(keys, cos, sin), values], dim=1).transpose(-2, -3)

    def block_states(
        self,
        block_embeds: torch.Tensor,
        position_ids: torch.Tensor,
        context: ContextMemory,
        attention_mask: dict[str, torch.Tensor | None],
    ) -> torch.Tensor:
        """As `DominoDraftModel.forward`: block states `[B, K, H]`."""
        cos, sin = self._rotation(block_embeds, position_ids)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self._config._attn_implementation, eager_attention_forward)
        rows = block_embeds.flatten(0, 1)
        for layer, layer_type in zip(self._layers, self.layer_types, strict=True):
            rows = layer(rows, block_embeds.shape[0], cos, sin, context, attend, attention_mask.get(layer_type))
        return self._normed(rows, self._norm).view(block_embeds.shape)

    def _rotation(self, like: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and signed sines, `[B, S, 1, head_dim]`."""
        cos, sin = self._rotary(like, positions)
        sin[..., : self.head_dim // 2].neg_()
        return cos.unsqueeze(2), sin.unsqueeze(2)

    def _normed(self, rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(rows, weight.shape, weight, self.eps)


class _Layer:
    """One decoder layer over the rows `[B·K, H]` of all blocks."""

    def __init__(self, layer: DominoLayer, make_product: MakeProduct, dtype: torch.dtype):
        attention, mlp = layer.self_attn, layer.mlp
        projections = [attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight]
        self.attention = attention  # for the attention function, which reads its settings
        self.head_dim = attention.head_dim
        heads = [weight.shape[0] // self.head_dim for weight in projections]
        self._queries, self._keys_or_values = heads[0], heads[1]
        self._in = make_product(torch.cat(projections))
        norms = [attention.q_norm.weight.expand(heads[0], -1), attention.k_norm.weight.expand(heads[1], -1)]
        self._query_key_norm = torch.cat(norms).to(dtype)
        self._out = make_product(attention.o_proj.weight)
        self._gate, self._up, self._down = (
            make_product(linear.weight) for linear in (mlp.gate_proj, mlp.up_proj, mlp.down_proj)
        )
        self._activation = mlp.act_fn
        self._attention_norm = layer.input_layernorm.weight.to(dtype)
        self._mlp_norm = layer.post_attention_layernorm.weight.to(dtype)
        self._eps = layer.input_layernorm.variance_epsilon

    def __call__(self, rows, batch: int, cos, sin, context: ContextMemory, attend, mask) -> torch.Tensor:
        normed = F.rms_norm(rows, rows.shape[-1:], self._attention_norm, self._eps)
        heads = self._in(normed).view(batch, -1, 2 * self._keys_or_values + self._queries, self.head_dim)
        both, values = heads.split([self._queries + self._keys_or_values, self._keys_or_values], dim=2)
        both = F.rms_norm(both, (self.head_dim,), eps=self._eps) * self._query_key_norm
        queries, keys = _rotated(both, cos, sin).transpose(1, 2).split([self._queries, self._keys_or_values], dim=1)
        keys, values = context.update(keys, values.transpose(1, 2), self.attention.layer_idx)
        attended, _ = attend(
            self.attention,
            queries,
            keys,
            values,
            mask,
            scaling=self.attention.scaling,
            sliding_window=self.attention.sliding_window,
        )
        rows = rows + self._out(attended.reshape(rows.shape[0], -1))
        normed = F.rms_norm(rows, rows.shape[-1:], self._mlp_norm, self._eps)
        return rows + self._down(self._activation(self._gate(normed)) * self._up(normed))


def _rotated(states: torch.Tensor, cos: torch.Tensor, signed_sin: torch.Tensor) -> torch.Tensor:
    """Rotary embedding, as `rotate_half` has it: the halves swapped, the first one's sign in the sines."""
    return torch.addcmul(states * cos, states.roll(states.shape[-1] // 2, dims=-1), signed_sin)


class ModelBackbone:
    """The same by the model's own forward, for drafters without `plain_weights`."""

    def __init__(self, drafter: DominoDraftModel):
        self._drafter = drafter

    def context_keys_values(self, tapped_BST: torch.Tensor, position_ids_BS: torch.Tensor) -> torch.Tensor:
        layers = self._drafter.context_keys_values(tapped_BST, position_ids_BS)
        return torch.stack([torch.stack(part).to(tapped_BST.device) for part in layers])

    def block_states(self, block_embeds, position_ids, context, attention_mask) -> torch.Tensor:
        return self._drafter(block_embeds, position_ids, context, attention_mask)


def plain_weights(drafter: DominoDraftModel) -> list[torch.Tensor] | None:
    """The backbone's weights, or `None` where they do not say all and the model's own forward has to run.

    So it is with adapters, quantised or offloaded layers, hooks, biases, and layers on several devices.
    """
    layers = drafter.layers
    attention, mlp = [layer.self_attn for layer in layers], [layer.mlp for layer in layers]
    linears: list[Any] = [drafter.fc]
    linears += [getattr(part, f"{name}_proj") for part in attention for name in "qkvo"]
    linears += [getattr(part, f"{name}_proj") for part in mlp for name in ("gate", "up", "down")]
    norms: list[Any] = [drafter.hidden_norm, drafter.norm]
    norms += [norm for layer in layers for norm in (layer.input_layernorm, layer.post_attention_layernorm)]
    norms += [norm for part in attention for norm in (part.q_norm, part.k_norm)]
    parts = [*linears, *norms, *layers, *attention, *mlp]
    if not all(type(linear) is nn.Linear and linear.bias is None for linear in linears):
        return None
    if not all(type(norm) is Qwen3RMSNorm for norm in norms):
        return None
    if any("forward" in part.__dict__ or part._forward_hooks or part._forward_pre_hooks for part in parts):
        return None
    weights = [part.weight for part in linears + norms]
    return weights if len({weight.device for weight in weights}) == 1 else None
