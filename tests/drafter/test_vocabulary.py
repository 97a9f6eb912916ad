import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from hf_domino import DominoDraftModel
from hf_domino.drafter.drafting_domino import DraftingSession
from hf_domino.drafter.target_domino import Target
from hf_domino.drafter.vocabulary_domino import buffers_from_tokens, check_buffers, token_ids
from tests.tiny import VOCAB_SIZE, drafted_text, plain_text, prompt_ids, skilled_drafter, tiny_target

CHOSEN = torch.tensor([3, 4, 7, 10, 20, 21, 22, 40, 58, 60])


def levels(drafter, target, anchor=5):
    session = DraftingSession(drafter, Target(target, drafter.config))
    taps = len(drafter.config.target_layer_ids) * drafter.config.hidden_size
    session.observe(torch.randn(1, 6, taps, generator=torch.Generator().manual_seed(3)), [6])
    return session.propose(torch.tensor([anchor]), 4, 5)


def test_offsets_lead_back_to_the_tokens():
    d2t, t2d = buffers_from_tokens(CHOSEN.flip(0), VOCAB_SIZE)
    assert token_ids(d2t).tolist() == CHOSEN.tolist()
    assert t2d.nonzero()[:, 0].tolist() == CHOSEN.tolist()
    check_buffers(d2t, t2d)


@pytest.mark.parametrize("tokens", [[1, 1, 2], [-1, 3], [3, VOCAB_SIZE]])
def test_a_list_that_is_no_vocabulary_is_refused(tokens):
    with pytest.raises(ValueError, match="distinct token ids"):
        buffers_from_tokens(torch.tensor(tokens), VOCAB_SIZE)


@pytest.mark.parametrize("head_type", ["gru", "attention"])
def test_all_tokens_as_draft_vocabulary_change_nothing(head_type):
    target = tiny_target()
    drafter = skilled_drafter(target, head_type)
    before = levels(drafter, target)
    drafter.restrict_vocabulary(torch.arange(VOCAB_SIZE))
    after = levels(drafter, target)
    assert torch.equal(before.tokens_BDW, after.tokens_BDW)
    torch.testing.assert_close(before.logprobs_BDW, after.logprobs_BDW, rtol=1e-4, atol=1e-4)


def test_only_chosen_tokens_are_drafted_and_the_text_stays():
    target = tiny_target()
    drafter = skilled_drafter(target, candidate_pool_size=4)
    drafter.restrict_vocabulary(CHOSEN)
    drafted = levels(drafter, target)
    nodes = drafted.tokens_BDW[drafted.logprobs_BDW > -torch.inf]
    assert nodes.numel() > 0
    assert set(nodes.tolist()) <= set(CHOSEN.tolist())
    for seed in range(6):
        ids = prompt_ids(5, seed)
        wanted = plain_text(target, ids, max_new_tokens=20)
        assert torch.equal(drafted_text(target, drafter, ids, max_new_tokens=20), wanted)


def test_a_restricted_drafter_is_saved_and_says_so(tmp_path):
    target = tiny_target()
    drafter = skilled_drafter(target)
    drafter.restrict_vocabulary(CHOSEN)
    drafter.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["draft_vocab_size"] == len(CHOSEN)
    assert load_file(tmp_path / "model.safetensors")["embed_proj.2.weight"].shape[0] == len(CHOSEN)
    loaded = DominoDraftModel.from_pretrained(tmp_path)
    assert torch.equal(levels(loaded, target).tokens_BDW, levels(drafter, target).tokens_BDW)
    with pytest.raises(ValueError, match="already"):
        loaded.restrict_vocabulary(CHOSEN)


def test_an_unrestricted_drafter_does_not_mention_it(tmp_path):
    drafter = skilled_drafter(tiny_target())
    drafter.save_pretrained(tmp_path)
    assert "draft_vocab_size" not in json.loads((tmp_path / "config.json").read_text())


def test_maps_that_disagree_are_refused_at_load(tmp_path):
    drafter = skilled_drafter(tiny_target())
    drafter.restrict_vocabulary(CHOSEN)
    drafter.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["t2d"][CHOSEN[0]] = False
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match="different draft vocabularies"):
        DominoDraftModel.from_pretrained(tmp_path)
