"""One forward of the target over draft trees, and keeping one path of it in the target's cache."""

from typing import Any

import torch
from transformers import Cache, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer, StaticLayer, StaticSlidingWindowLayer

from .tree_domino import DraftTree

_LAYERS = {DynamicLayer, DynamicSlidingWindowLayer, StaticLayer, StaticSlidingWindowLayer}
_LAYER_TYPES = {"full_attention", "sliding_attention"}
_ATTENTION = {"eager", "sdpa"}


def can_verify_trees(target: PreTrainedModel, cache: Any) -> bool:
    """Whether this target and cache can verify a tree: any mask, depths as positions, and keeping a chosen path."""
    config = target.config.get_text_config()
    return (
        isinstance(cache, Cache)
        and not getattr(cache, "offloading", False)
        and {type(layer) for layer in cache.layers} <= _LAYERS
        and getattr(cache, "layer_class_to_replicate", None) in (None, DynamicLayer)
        and config._attn_implementation in _ATTENTION
        and set(getattr(config, "layer_types", None) or ["full_attention"]) <= _LAYER_TYPES
        and not getattr(config, "attention_chunk_size", None)
    )


def static_length(cache: Cache) -> int | None:
    """Slots of a static cache, filled or not; `None` for one that grows."""
    lengths = [layer.max_cache_len for layer in cache.layers if isinstance(layer, StaticLayer)]
    return min(lengths) if lengths else None


def outgrows(cache: Any, length: int) -> bool:
    """Whether a text of this length outgrows a static cache or a static layer's window: what a refused draft had
    overwritten there would be missing."""
    slots = static_length(cache) if isinstance(cache, Cache) else None
    return slots is not None and slots < length - 1  # the last token is not cached


def sliding_window(target: PreTrainedModel) -> int | None:
    """The target's attention window, or `None` if every layer sees everything."""
    config = target.config.get_text_config()
    layer_types = getattr(config, "layer_types", None)
    if layer_types is not None and "sliding_attention" not in layer_types:
        return None
    return getattr(config, "sliding_window", None)


def tree_attention_mask(
    target: PreTrainedModel,
    cache: Cache,
    trees: list[DraftTree],
    slot_positions_BT: torch.Tensor,
    anchors_B: torch.Tensor,
) -> "torch.Tensor | dict[str, torch.Tensor]":
    """The additive mask `[B, 1, N, T + N]` of draft trees behind a cached context, per layer type where the target has.

    A static cache's further slots, which are empty, are in it too.

    Args:
        cache: whose sliding layers, if it has such and grows, hold the window only.
        trees: one per sequence; N is the largest one's nodes.
        slot_positions_BT: position of the token in each of the T cached slots; -1 where a slot is empty.
        anchors_B: position of each anchor.
    """
    nodes = max(len(tree) for tree in trees)
    device = slot_positions_BT.device
    # Padding nodes see the anchor, so that no row of the softmax is empty.
    block = torch.zeros(len(trees), nodes, nodes, dtype=torch.bool)
    block[:, :, 0] = True
    depths = torch.zeros(len(trees), nodes, dtype=torch.long)
    for row, tree in enumerate(trees):
        block[row, : len(tree), : len(tree)] = tree.ancestor_mask()
        depths[row, : len(tree)] = torch.tensor(tree.depths)
    positions_BN = anchors_B[:, None] + depths.to(device)
    block = block.to(device)
    window = sliding_window(target)
    # Of static layers, by whether they slide: those that do may have fewer slots.
    slots = {layer.is_sliding: layer.max_cache_len for layer in cache.layers if isinstance(layer, StaticLayer)}
    # A cache made without the target's configuration keeps everything, as does a static one.
    slides = any(cache.is_sliding) and not slots

    def additive(window: int | None) -> torch.Tensor:
        kept = slot_positions_BT if window is None or not slides else slot_positions_BT[:, -(window - 1) :]
        context = (kept >= 0)[:, None].expand(-1, nodes, -1)
        own = block
        if window is not None:
            context = context & (positions_BN[..., None] - kept[:, None] < window)
            own = block & (positions_BN[..., None] - positions_BN[:, None] < window)
        visible = torch.cat([context, own], dim=-1)[:, None]
        if slots:
            width = slots.get(window is not None, max(slots.values()))
            visible = torch.nn.functional.pad(visible, (0, width - visible.shape[-1]))
        mask = torch.zeros(visible.shape, dtype=target.dtype, device=device)
        return mask.masked_fill_(~visible, torch.finfo(target.dtype).min)

    layer_types = getattr(target.config.get_text_config(), "layer_types", None)
    if layer_types is None:
        return additive(window)
    if set(layer_types) == {"full_attention"}:
        return additive(None)
    return {kind: additive(window if kind == "sliding_attention" else None) for kind in set(layer_types)}


def keep_path(cache: Cache, length: int, num_nodes: int, paths: list[list[int]]) -> None:
    """Keeps each sequence's path of the last `num_nodes` entries, moved to the front of them, and drops the rest.

    Args:
        length: entries before these, of a layer that keeps all.
        paths: node indices of the entries to keep, ascending; shorter ones leave empty slots behind theirs, up to
            the longest path.
    """
    longest = max(len(path) for path in paths)
    moves = [(row, path) for row, path in enumerate(paths) if path != list(range(len(path)))]
    for layer in cache.layers:
        if not layer.is_initialized:
            continue
        for row, path in moves:
            for states in (layer.keys, layer.values):
                assert states is not None  # of an initialised layer
                start = length if isinstance(layer, StaticLayer) else states.shape[2] - num_nodes
                block = states[row, :, start : start + num_nodes]
                block[:, : len(path)] = block[:, path]
    # Also where nothing is dropped: sliding layers shrink back to their window here.
    cache.crop(-(num_nodes - longest))


def compact(cache: Cache, slot_positions_BT: torch.Tensor, slack: float = 1.1) -> torch.Tensor:
    """Moves each sequence's entries together once empty slots take more than `slack` of what is needed.

    Sequences of a batch accept different numbers of tokens, and the shorter ones leave empty slots. Full-length
    layers only: `loop_applies` lets no batch outgrow a window.

    Returns:
        The new positions by slot: empty slots are at the front now.
    """
    filled = slot_positions_BT >= 0
    needed = int(filled.sum(-1).max())
    if slot_positions_BT.shape[1] <= slack * needed:
        return slot_positions_BT
    order = torch.argsort(filled.to(torch.int8), dim=1, stable=True)[:, -needed:]
    for layer in cache.layers:
        if not layer.is_initialized:
            continue
        index = order[:, None, :, None].to(layer.keys.device)
        layer.keys = layer.keys.gather(2, index.expand(-1, layer.keys.shape[1], -1, layer.keys.shape[3]))
        layer.values = layer.values.gather(2, index.expand(-1, layer.values.shape[1], -1, layer.values.shape[3]))
        if hasattr(layer, "cumulative_length"):
            layer.cumulative_length = needed
    return slot_positions_BT.gather(1, order)
