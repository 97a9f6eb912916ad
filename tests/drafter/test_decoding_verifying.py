"""One forward over a tree gives every path's own logits, and the kept path is the cache of having gone that way."""

import pytest
import torch
from transformers import Cache, DynamicCache, StaticCache

from hf_domino.drafter.tree_domino import DraftTree
from hf_domino.drafter.verifying_domino import compact, keep_path, tree_attention_mask
from tests.contract.pairs import CONTRACT_FAMILIES, WINDOW, assert_same, pair
from tests.tiny import prompt_ids


def branching_tree() -> DraftTree:
    tree = DraftTree(7)
    for path in ([10, 11, 12, 13], [10, 14, 15], [20], [21, 22, 23, 24]):
        tree.add_path(path, [0.5] * len(path))
    return tree


def path_to(tree: DraftTree, node: int) -> list[int]:
    return ([] if node == 0 else path_to(tree, tree.parents[node])) + [node]


@torch.no_grad()
def prefilled(target, prompt, slots: int | None = None) -> Cache:
    """A cache over the prompt: one that grows, or one of this many slots."""
    config = target.config.get_text_config()
    cache = DynamicCache(config=config) if slots is None else StaticCache(config=config, max_cache_len=slots)
    target(prompt, cache=cache)
    cache.activate_past_recording()
    return cache


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("length", [4, WINDOW - 1, WINDOW, WINDOW + 6])
@pytest.mark.parametrize("family", CONTRACT_FAMILIES)
@torch.no_grad()
def test_a_tree_is_verified_as_its_paths_are(family, length, attention):
    target, _ = pair(family, "eager" if family == "gemma2" else attention)
    prompt, tree = prompt_ids(length, 5), branching_tree()
    cache = prefilled(target, prompt)
    positions = torch.arange(length)[None]
    mask = tree_attention_mask(target, cache, [tree], positions, torch.tensor([length]))
    logits = target(
        torch.tensor([tree.tokens]), cache=cache, attention_mask=mask,
        position_ids=length + torch.tensor([tree.depths]),
    ).logits  # fmt: skip
    for node in range(len(tree)):
        path = torch.tensor([[tree.tokens[n] for n in path_to(tree, node)]])
        alone = target(torch.cat([prompt, path], dim=1)).logits[:, -1]
        torch.testing.assert_close(logits[:, node], alone, atol=1e-4, rtol=1e-4)

    kept = path_to(tree, tree.child(tree.child(0, 21), 22))
    keep_path(cache, length, len(tree), [kept])
    straight = prefilled(target, torch.cat([prompt, torch.tensor([[tree.tokens[n] for n in kept]])], dim=1))
    assert cache.get_seq_length() == straight.get_seq_length()
    for layer, expected in zip(cache.layers, straight.layers, strict=True):
        assert_same([layer.keys, layer.values], [expected.keys, expected.values])


@pytest.mark.parametrize("spare", [0, 7])
@torch.no_grad()
def test_a_tree_in_a_static_cache_is_verified_as_in_one_that_grows(spare):
    target, _ = pair("llama")
    prompt, tree = prompt_ids(5, 5), branching_tree()
    kept, results = path_to(tree, tree.child(tree.child(0, 21), 22)), []
    for cache in (prefilled(target, prompt), prefilled(target, prompt, 5 + len(tree) + spare)):
        mask = tree_attention_mask(target, cache, [tree], torch.arange(5)[None], torch.tensor([5]))
        inputs = {"attention_mask": mask, "position_ids": 5 + torch.tensor([tree.depths])}
        logits = target(torch.tensor([tree.tokens]), cache=cache, **inputs).logits
        keep_path(cache, 5, len(tree), [kept])
        length = int(cache.get_seq_length())
        assert length == 5 + len(kept)
        results.append([logits, *((layer.keys[:, :, :length], layer.values[:, :, :length]) for layer in cache.layers)])
    assert_same(*results)


def test_padding_nodes_of_a_smaller_tree_are_seen_by_none():
    target, _ = pair("llama")
    trees = [branching_tree(), DraftTree(5)]
    slots = torch.tensor([[0, 1, 2], [-1, 0, 1]])
    mask = tree_attention_mask(target, prefilled(target, prompt_ids(3, batch=2)), trees, slots, torch.tensor([3, 2]))
    visible = mask[:, 0] == 0
    nodes = len(trees[0])
    assert visible.shape == (2, nodes, 3 + nodes)
    assert visible[1, 0].tolist() == [False, True, True, True] + [False] * (nodes - 1)
    assert visible.any(-1).all()  # no row of the softmax is empty


def test_compacting_keeps_every_entry_in_order():
    torch.manual_seed(0)
    slots = torch.full((3, 20), -1)
    for row, count in enumerate((9, 4, 12)):
        places = torch.randperm(20)[:count].sort().values
        slots[row, places] = torch.arange(count)
    keys = torch.randn(3, 2, 20, 4)
    cache = DynamicCache()
    cache.update(keys.clone(), -keys, 0)
    moved = compact(cache, slots)
    assert moved.shape == (3, 12)
    for row in range(3):
        assert moved[row][moved[row] >= 0].tolist() == slots[row][slots[row] >= 0].tolist()
        torch.testing.assert_close(cache.layers[0].keys[row][:, moved[row] >= 0], keys[row][:, slots[row] >= 0])
        torch.testing.assert_close(cache.layers[0].values[row][:, moved[row] >= 0], -keys[row][:, slots[row] >= 0])


def test_few_empty_slots_are_left_where_they_are():
    slots = torch.arange(20).repeat(2, 1)
    slots[0, 5] = -1
    cache = DynamicCache()
    cache.update(torch.randn(2, 2, 20, 4), torch.randn(2, 2, 20, 4), 0)
    assert compact(cache, slots) is slots and cache.get_seq_length() == 20
