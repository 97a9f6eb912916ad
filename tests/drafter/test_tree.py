"""Draft trees: merging, ranking, cutting, masks."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hf_domino.drafter.tree_domino import DraftTree

BRANCHES = st.lists(
    st.tuples(st.lists(st.integers(0, 3), min_size=1, max_size=5), st.floats(0.05, 1.0)), min_size=1, max_size=8
)


def grown(branches) -> DraftTree:
    tree = DraftTree(9)
    for tokens, probability in branches:
        tree.add_path(tokens, [probability] * len(tokens))
    return tree


def paths(tree: DraftTree) -> set[tuple[int, ...]]:
    """The tokens on the way to every node."""
    found = [(tree.tokens[0],)]
    for node in range(1, len(tree)):
        found.append((*found[tree.parents[node]], tree.tokens[node]))
    return set(found)


def test_branches_merge_where_they_agree():
    tree = grown([([1, 2, 3], 0.5), ([1, 2, 4], 0.8)])
    assert tree.tokens == [9, 1, 2, 3, 4] and tree.parents == [-1, 0, 1, 2, 2] and tree.depths == [0, 1, 2, 3, 3]
    assert tree.probabilities[1] == 0.8 and math.isclose(tree.probabilities[2], 0.64)  # the better of two guesses
    assert tree.child(2, 4) == 4 and tree.child(2, 5) is None
    assert not tree.is_chain and grown([([1, 2, 3], 0.5)]).is_chain


def test_levels_name_parents_by_their_place_in_the_level_above():
    tree = DraftTree(9)
    tree.add_levels([[1, 2], [3, 4, 5]], [[0, 0], [1, 0, 1]], [[-0.1, -1.0], [-1.2, -1.5, -math.inf]])
    assert paths(tree) == {(9,), (9, 1), (9, 2), (9, 2, 3), (9, 1, 4)}
    scaled = DraftTree(9)
    scaled.add_levels([[1]], [[0]], [[math.log(0.8)]], scale=0.5)
    assert math.isclose(scaled.probabilities[1], 0.4)


@given(BRANCHES, st.integers(0, 12))
def test_the_best_nodes_come_with_their_parents_and_outrank_the_rest(branches, count):
    tree = grown(branches)
    best = tree.best(count)
    assert len(best) == 1 + min(count, len(tree) - 1)
    assert paths(best) <= paths(tree)
    assert best.depths == sorted(best.depths)
    dropped = sorted(tree.probabilities[1:], reverse=True)[count:]
    assert not dropped or min(best.probabilities) >= dropped[0]


@given(BRANCHES, st.integers(0, 5))
def test_within_cuts_at_a_depth(branches, depth):
    tree = grown(branches)
    assert paths(tree.within(depth)) == {path for path in paths(tree) if len(path) <= depth + 1}


def test_unsure_tokens_are_left_out_with_what_follows_them():
    tree = DraftTree(9)
    logprobs = [[math.log(0.9), math.log(0.3)], [math.log(0.9 * 0.9), math.log(0.3 * 0.9)]]
    tree.add_levels([[1, 3], [2, 4]], [[0, 0], [0, 1]], logprobs, confidence=0.5)
    assert paths(tree) == {(9,), (9, 1), (9, 1, 2)}


def test_a_threshold_is_for_the_drafters_own_probability_not_the_corrected_one():
    for confidence, kept in ((0.7, 2), (0.5, 3)):
        tree = DraftTree(9)
        tree.add_levels([[1], [2]], [[0], [0]], [[math.log(0.8)], [math.log(0.8 * 0.6)]], 0.5, confidence)
        assert len(tree) == kept
        assert tree.probabilities == pytest.approx([1.0, 0.4, 0.24][:kept])
        assert tree.drafted == pytest.approx([1.0, 0.8, 0.48][:kept])


def test_what_the_drafter_is_unsure_of_the_text_may_still_offer():
    tree = DraftTree(9)
    tree.add_levels([[1]], [[0]], [[math.log(0.01)]], confidence=0.4)
    tree.add_path([1, 2], [0.9, 0.9])
    assert paths(tree) == {(9,), (9, 1), (9, 1, 2)}


def test_a_node_of_drafter_and_text_keeps_the_drafters_own_probability():
    tree = DraftTree(9)
    tree.add_levels([[1]], [[0]], [[math.log(0.3)]])
    tree.add_path([1, 2], [0.9, 0.9])
    kept = tree.best(2)
    assert kept.drafted == pytest.approx([1.0, 0.3, 0.0]) and kept.probabilities == pytest.approx([1.0, 0.9, 0.81])


@given(BRANCHES)
def test_a_node_sees_itself_and_its_ancestors(branches):
    tree = grown(branches)
    mask = tree.ancestor_mask()
    for node in range(len(tree)):
        ancestors, above = {node}, node
        while above:
            above = tree.parents[above]
            ancestors.add(above)
        assert set(torch.nonzero(mask[node]).flatten().tolist()) == ancestors
        assert mask[node].sum() == tree.depths[node] + 1
