"""The hook into transformers: installed once, removed cleanly, and in nobody else's way."""

import pytest
import torch
from transformers import GenerationMixin

import hf_domino
from hf_domino.drafter import integration_domino
from tests.tiny import drafted_text, plain_text, prompt_ids, tiny_drafter, tiny_target

NAMES = ("_get_candidate_generator", "_assisted_decoding")


@pytest.fixture(autouse=True)
def _installed_again():
    yield
    hf_domino.install()


def methods():
    return [getattr(GenerationMixin, name) for name in NAMES]


def test_installing_again_changes_nothing():
    before = methods()
    hf_domino.install()
    assert methods() == before


def test_uninstall_restores_and_install_returns():
    ours = methods()
    hf_domino.uninstall()
    theirs = methods()
    assert all(a is not b for a, b in zip(ours, theirs, strict=True))
    assert all(method.__module__ == "transformers.generation.utils" for method in theirs)
    hf_domino.uninstall()
    assert methods() == theirs
    hf_domino.install()
    assert all(a is not b for a, b in zip(methods(), theirs, strict=True))


def test_a_drafter_works_after_installing_again():
    target = tiny_target()
    drafter, ids = tiny_drafter(target), prompt_ids(4)
    plain = plain_text(target, ids, max_new_tokens=8)
    hf_domino.uninstall()
    assert torch.equal(plain_text(target, ids, max_new_tokens=8), plain)
    hf_domino.install()
    assert torch.equal(drafted_text(target, drafter, ids, max_new_tokens=8), plain)
    assert drafter.drafting_stats.drafted


def test_the_hook_keeps_names_documentation_and_signature():
    import inspect

    for name, ours in zip(NAMES, methods(), strict=True):
        hf_domino.uninstall()
        theirs = getattr(GenerationMixin, name)
        hf_domino.install()
        assert (ours.__name__, ours.__doc__) == (theirs.__name__, theirs.__doc__)
        assert inspect.signature(ours) == inspect.signature(theirs)


def test_other_assistants_go_to_transformers_untouched():
    target, ids = tiny_target(), prompt_ids(4)
    other = tiny_target("qwen3", seed=3)
    arguments = dict(max_new_tokens=10, eos_token_id=None)
    plain = plain_text(target, ids, **arguments)
    assert torch.equal(plain_text(target, ids, assistant_model=other, **arguments), plain)
    assert torch.equal(plain_text(target, ids, prompt_lookup_num_tokens=3, **arguments), plain)


def test_a_transformers_with_other_names_is_refused_in_one_sentence(monkeypatch):
    hf_domino.uninstall()
    with monkeypatch.context() as patched:
        patched.setattr(GenerationMixin, "_assisted_decoding", lambda self, ids: None)
        with pytest.raises(ImportError, match="GenerationMixin._assisted_decoding.*upgrade hf-domino"):
            integration_domino.install()
        assert not hasattr(GenerationMixin._get_candidate_generator, integration_domino._MARK)
