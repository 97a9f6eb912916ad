"""The package against the naive implementation in tests/reference: states, logits and drafts."""

import pytest
import torch

from hf_domino.drafter.drafting_domino import DraftingSession
from hf_domino.drafter.target_domino import Target
from hf_domino.drafter.tree_domino import DraftTree
from tests.reference.naive_domino import NaiveDomino
from tests.tiny import prompt_ids, tiny_drafter, tiny_target

TIGHT = dict(rtol=1e-4, atol=2e-4)


def pair(family="llama", **drafter_fields):
    """A target, a session of a drafter for it, and its naive counterpart."""
    target = tiny_target(family)
    drafter = tiny_drafter(target, **({"block_size": 4} | drafter_fields))
    view = Target(target, drafter.config)
    naive = NaiveDomino(
        drafter.state_dict(),
        drafter.config.to_dict(),
        target.get_input_embeddings().weight,
        target.get_output_embeddings().weight,
    )
    return target, DraftingSession(drafter, view), naive


def rounds(target, session, text, sizes):
    """Feeds a text round by round; yields the anchor's position, and the target's states, before each draft."""
    with torch.no_grad():
        states = target(text, output_hidden_states=True).hidden_states
        tapped = session.target.tapped_states(states)
        anchor = 0
        for size in sizes:
            session.observe(tapped[:, anchor : anchor + size], [size])
            anchor += size
            yield anchor, states


@pytest.mark.parametrize("shift_label", [True, False])
@pytest.mark.parametrize("head_type", ["gru", "attention", "none"])
def test_drafts_equal_the_naive_ones(head_type, shift_label):
    target, session, naive = pair(head_type=head_type, shift_label=shift_label)
    text = prompt_ids(14, seed=3)
    for anchor, states in rounds(target, session, text, [5, 1, 4]):
        token = int(text[0, anchor])
        naive_states = naive.block_states(states, token, anchor)
        with torch.no_grad():
            mine = session.block_states(text[:, anchor])[0]
        torch.testing.assert_close(mine.double(), torch.stack(naive_states), **TIGHT)
        drafts, logits = naive.greedy_draft(naive_states, token)
        levels = session.propose(text[:, anchor], depth=99, width=1)
        assert levels.tokens_BDW[0, :, 0].tolist() == drafts
        assert len(drafts) == session.config.max_drafts == (4 if shift_label else 3)
        chosen = torch.stack([row.log_softmax(-1).max() for row in logits]).cumsum(0)
        torch.testing.assert_close(levels.logprobs_BDW[0, :, 0].double(), chosen, **TIGHT)


@pytest.mark.parametrize("pure", [0, 2])
@pytest.mark.parametrize("head_type", ["gru", "attention"])
def test_whole_distributions_equal_the_naive_ones(head_type, pure):
    target, session, naive = pair(head_type=head_type, pure_draft_prefix_len=pure)
    text = prompt_ids(8, seed=4)
    vocab = target.config.vocab_size
    for anchor, states in rounds(target, session, text, [7]):
        token = int(text[0, anchor])
        naive_states = naive.block_states(states, token, anchor)
        first = naive.logits(naive_states, [token]).log_softmax(-1)
        levels = session.propose(text[:, anchor], depth=2, width=vocab)
        mine = torch.full((vocab,), -torch.inf).index_copy(0, levels.tokens_BDW[0, 0], levels.logprobs_BDW[0, 0])
        torch.testing.assert_close(mine.double(), first, **TIGHT)
        for token_2, parent, logprob in zip(
            *(part[0, 1].tolist() for part in (levels.tokens_BDW, levels.parents_BDW, levels.logprobs_BDW)), strict=True
        ):
            token_1 = int(levels.tokens_BDW[0, 0, parent])
            second = naive.logits(naive_states, [token, token_1]).log_softmax(-1)
            assert logprob == pytest.approx(float(first[token_1] + second[token_2]), abs=5e-4)


@pytest.mark.parametrize("nodes", [1, 4, 9])
def test_levels_narrowed_to_the_nodes_wanted_give_the_same_tree(nodes):
    target, session, _ = pair(block_size=6)
    text = prompt_ids(12, seed=4)
    for anchor, _ in rounds(target, session, text, [7, 2]):
        trees = []
        for levels in (session.propose(text[:, anchor], 9, nodes), session.propose(text[:, anchor], 9, nodes, nodes)):
            tree = DraftTree(int(text[0, anchor]))
            tree.add_levels(*levels.to_host()[0])
            trees.append(tree.best(nodes))
        assert trees[0].tokens == trees[1].tokens and trees[0].parents == trees[1].parents
        assert len(trees[1]) == nodes + 1


@pytest.mark.parametrize("window", [3, 40])
def test_context_window_equals_the_naive_one(window):
    target, session, naive = pair(context_window=window)
    text = prompt_ids(30, seed=5)
    for anchor, states in rounds(target, session, text, [2, 9, 1, 3, 6, 5]):
        naive_states = naive.block_states(states, int(text[0, anchor]), anchor, context_window=window)
        with torch.no_grad():
            mine = session.block_states(text[:, anchor])[0]
        torch.testing.assert_close(mine.double(), torch.stack(naive_states), **TIGHT)


@pytest.mark.parametrize("context_window", [None, 4, 9])
def test_sliding_layers_equal_the_naive_ones(context_window):
    target, session, naive = pair(
        layer_types=["sliding_attention", "full_attention"],
        sliding_window=6,
        use_sliding_window=True,
        context_window=context_window,
    )
    text = prompt_ids(22, seed=6)
    for anchor, states in rounds(target, session, text, [2, 7, 3, 8]):
        naive_states = naive.block_states(states, int(text[0, anchor]), anchor, context_window)
        with torch.no_grad():
            mine = session.block_states(text[:, anchor])[0]
        torch.testing.assert_close(mine.double(), torch.stack(naive_states), **TIGHT)


@pytest.mark.parametrize("family", ["gemma3", "qwen3_tied", "mistral_sliding"])
def test_families_equal_the_naive_drafter(family):
    target, session, naive = pair(family, shift_label=False)
    text = prompt_ids(18, seed=7)
    for anchor, states in rounds(target, session, text, [14, 2]):
        token = int(text[0, anchor])
        drafts, _ = naive.greedy_draft(naive.block_states(states, token, anchor), token)
        assert session.propose(text[:, anchor], depth=99, width=1).tokens_BDW[0, :, 0].tolist() == drafts


def test_a_batch_of_ragged_contexts_equals_the_naive_drafter():
    target, session, naive = pair()
    texts = prompt_ids(12, seed=8, batch=3)
    counts = [9, 4, 6]
    with torch.no_grad():
        states = target(texts, output_hidden_states=True).hidden_states
        session.observe(session.target.tapped_states(states)[:, :9], counts)
        anchors = texts[torch.arange(3), torch.tensor(counts)]
        mine = session.block_states(anchors)
        levels = session.propose(anchors, depth=99, width=1)
    for row, anchor in enumerate(counts):
        own = tuple(layer[row : row + 1] for layer in states)
        naive_states = naive.block_states(own, int(anchors[row]), anchor)
        torch.testing.assert_close(mine[row].double(), torch.stack(naive_states), **TIGHT)
        assert levels.tokens_BDW[row, :, 0].tolist() == naive.greedy_draft(naive_states, int(anchors[row]))[0]
