"""A naive Domino drafter, to compare the package with: written from the method's description alone.

No cache, no candidate pool, no batches, no modules: every round recomputes everything, one position, one head and one
token at a time, in float64, from a state dict under the community's tensor names and a `config.json` in its layout.

What the description leaves to a runtime is fixed here as the package documents it: the attention head has heads of
width 32, positions within the block, RoPE theta 10,000, and attends over the pairs `[z_k ; E(x_{a+k})]`; a sliding
window w lets a row at position q see context positions p with q - p < w; a context window w keeps the last w positions.
"""

import math
from typing import Any

import torch

Tensors = dict[str, torch.Tensor]


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return weight * x / torch.sqrt((x * x).mean() + eps)


def silu(x: torch.Tensor) -> torch.Tensor:
    return x / (1 + torch.exp(-x))


def rotate(x: torch.Tensor, position: int, theta: float) -> torch.Tensor:
    """RoPE on one head's vector: dimension i is paired with dimension i + d/2."""
    half = x.shape[0] // 2
    out = x.clone()
    for i in range(half):
        angle = position / theta ** (2 * i / x.shape[0])
        cos, sin = math.cos(angle), math.sin(angle)
        out[i] = x[i] * cos - x[i + half] * sin
        out[i + half] = x[i + half] * cos + x[i] * sin
    return out


def attend(query: torch.Tensor, keys: list[torch.Tensor], values: list[torch.Tensor]) -> torch.Tensor:
    scores = torch.stack([query @ key for key in keys]) / math.sqrt(query.shape[0])
    weights = torch.exp(scores - scores.max())
    weights = weights / weights.sum()
    return sum(weight * value for weight, value in zip(weights, values, strict=True))


def swiglu(x: torch.Tensor, tensors: Tensors, prefix: str) -> torch.Tensor:
    gated = silu(tensors[f"{prefix}gate_proj.weight"] @ x) * (tensors[f"{prefix}up_proj.weight"] @ x)
    return tensors[f"{prefix}down_proj.weight"] @ gated


class NaiveDomino:
    """The whole method for one sequence.

    Args:
        tensors: the drafter's state dict. config: its `config.json`.
        embedding: the target's embedding matrix `[V, H]`. output_head: its output matrix `[V, H]`.
    """

    def __init__(self, tensors: Tensors, config: dict[str, Any], embedding: torch.Tensor, output_head: torch.Tensor):
        self.tensors = {name: tensor.detach().double() for name, tensor in tensors.items()}
        self.config = config
        self.dflash = config["dflash_config"]
        self.embedding = embedding.detach().double()
        self.output_head = output_head.detach().double()
        self.eps = config["rms_norm_eps"]
        self.theta = config["rope_theta"]

    @property
    def first_row(self) -> int:
        """The block row that the first draft is read from."""
        return 0 if self.dflash["shift_label"] else 1

    def context(self, hidden_states: tuple[torch.Tensor, ...], position: int) -> torch.Tensor:
        """c_p from the target's `hidden_states` (entry 0 is the embedding), one sequence."""
        tapped = [hidden_states[layer_id + 1][0, position].double() for layer_id in self.dflash["target_layer_ids"]]
        projected = self.tensors["fc.weight"] @ torch.cat(tapped)
        return rms_norm(projected, self.tensors["hidden_norm.weight"], self.eps)

    def project(
        self, x: torch.Tensor, name: str, prefix: str, position: int | None, head_dim: int, theta: float
    ) -> list[torch.Tensor]:
        """Queries, keys or values of one position, by head; rotated if a position is given."""
        heads = (self.tensors[f"{prefix}self_attn.{name}_proj.weight"] @ x).split(head_dim)
        if position is None:
            return list(heads)
        norm = self.tensors[f"{prefix}self_attn.{name}_norm.weight"]
        return [rotate(rms_norm(head, norm, self.eps), position, theta) for head in heads]

    def block_states(
        self, hidden_states: tuple[torch.Tensor, ...], anchor_token: int, anchor: int, context_window: int | None = None
    ) -> list[torch.Tensor]:
        """z_0 .. z_{K-1} of the block whose anchor stands at position `anchor`."""
        head_dim, rows = self.config["head_dim"], self.config["block_size"]
        groups = self.config["num_attention_heads"] // self.config["num_key_value_heads"]
        context = {p: self.context(hidden_states, p) for p in range(anchor)}
        states = [self.embedding[anchor_token]] + [self.embedding[self.dflash["mask_token_id"]]] * (rows - 1)
        for i, layer_type in enumerate(self.config["layer_types"]):
            prefix = f"layers.{i}."
            normed = [rms_norm(x, self.tensors[f"{prefix}input_layernorm.weight"], self.eps) for x in states]
            sources = context | {anchor + k: x for k, x in enumerate(normed)}
            keys = {p: self.project(x, "k", prefix, p, head_dim, self.theta) for p, x in sources.items()}
            values = {p: self.project(x, "v", prefix, None, head_dim, self.theta) for p, x in sources.items()}
            after = []
            for k, x in enumerate(normed):
                position = anchor + k
                seen = list(range(anchor, anchor + rows))
                for p in range(anchor):
                    in_layer = layer_type != "sliding_attention" or position - p < self.config["sliding_window"]
                    if in_layer and (context_window is None or anchor - p <= context_window):
                        seen.append(p)
                queries = self.project(x, "q", prefix, position, head_dim, self.theta)
                heads = [
                    attend(q, [keys[p][h // groups] for p in seen], [values[p][h // groups] for p in seen])
                    for h, q in enumerate(queries)
                ]
                y = states[k] + self.tensors[f"{prefix}self_attn.o_proj.weight"] @ torch.cat(heads)
                normed_y = rms_norm(y, self.tensors[f"{prefix}post_attention_layernorm.weight"], self.eps)
                after.append(y + swiglu(normed_y, self.tensors, f"{prefix}mlp."))
            states = after
        return [rms_norm(x, self.tensors["norm.weight"], self.eps) for x in states]

    def gru(self, tokens: list[int]) -> torch.Tensor:
        """The GRU's state after reading these tokens, from zero."""
        weight_ih, weight_hh = self.tensors["prefix_gru.weight_ih_l0"], self.tensors["prefix_gru.weight_hh_l0"]
        state = weight_hh.new_zeros(weight_hh.shape[1])
        for token in tokens:
            in_r, in_z, in_n = (weight_ih @ self.embedding[token]).chunk(3)
            st_r, st_z, st_n = (weight_hh @ state).chunk(3)
            reset, update = torch.sigmoid(in_r + st_r), torch.sigmoid(in_z + st_z)
            new = torch.tanh(in_n + reset * st_n)
            state = (1 - update) * new + update * state
        return state

    def attention_head(self, tokens: list[int], states: list[torch.Tensor]) -> torch.Tensor:
        """The causal layer's output at the last of these tokens."""
        prefix, head_dim, theta = "prefix_attention.layer.", 32, 10_000.0
        inputs = [
            self.tensors["prefix_attention.in_proj.weight"] @ torch.cat([z, self.embedding[token]])
            for z, token in zip(states, tokens, strict=True)
        ]
        normed = [rms_norm(x, self.tensors[f"{prefix}input_layernorm.weight"], self.eps) for x in inputs]
        keys = [self.project(x, "k", prefix, p, head_dim, theta) for p, x in enumerate(normed)]
        values = [self.project(x, "v", prefix, None, head_dim, theta) for x in normed]
        queries = self.project(normed[-1], "q", prefix, len(tokens) - 1, head_dim, theta)
        heads = [attend(q, [key[h] for key in keys], [value[h] for value in values]) for h, q in enumerate(queries)]
        y = inputs[-1] + self.tensors[f"{prefix}self_attn.o_proj.weight"] @ torch.cat(heads)
        normed_y = rms_norm(y, self.tensors[f"{prefix}post_attention_layernorm.weight"], self.eps)
        y = y + swiglu(normed_y, self.tensors, f"{prefix}mlp.")
        return rms_norm(y, self.tensors["prefix_attention.norm.weight"], self.eps)

    def logits(self, states: list[torch.Tensor], tokens: list[int]) -> torch.Tensor:
        """Final logits of the draft that follows these tokens (anchor first), given the block's states."""
        drafts_before = len(tokens) - 1
        state = states[drafts_before + self.first_row]
        base = self.output_head @ state
        projector = self.dflash["projector_type"]
        if projector == "dflash" or drafts_before < self.dflash["pure_draft_prefix_len"]:
            return base
        if projector == "domino":
            summary = self.gru(tokens)
        else:
            summary = self.attention_head(tokens, states[self.first_row : self.first_row + len(tokens)])
        features = silu(self.tensors["embed_proj.0.weight"] @ torch.cat([state, summary]))
        return base + self.tensors["embed_proj.2.weight"] @ features

    def greedy_draft(self, states: list[torch.Tensor], anchor_token: int) -> tuple[list[int], list[torch.Tensor]]:
        """All drafts of a block and the logits that each was picked from."""
        tokens, picked_from = [anchor_token], []
        for _ in range(len(states) - self.first_row):
            picked_from.append(self.logits(states, tokens))
            tokens.append(int(picked_from[-1].argmax()))
        return tokens[1:], picked_from
