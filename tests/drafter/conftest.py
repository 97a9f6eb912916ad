"""Fixtures for the drafter's tests."""

import functools

import pytest
from transformers import GenerationMixin

from hf_domino.drafter.integration_domino import _MARK
from tests.tiny import skilled_drafter, tiny_target


@pytest.fixture
def transformers_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sends drafters through transformers' own assisted loop, past this project's one."""
    original = getattr(GenerationMixin._assisted_decoding, _MARK)
    monkeypatch.setattr(GenerationMixin, "_assisted_decoding", original)


@functools.cache
def _pair(family: str, head_type: str, drafter_fields: tuple):
    target = tiny_target(family)
    return target, skilled_drafter(target, head_type, **dict(drafter_fields))


@pytest.fixture
def skilled_pair():
    """A factory of a target and a drafter that is often right; each pair is built once and handed out clean."""

    def make(family: str = "llama", head_type: str = "gru", **drafter_fields):
        target, drafter = _pair(family, head_type, tuple(drafter_fields.items()))
        drafter.drafting_stats = None
        drafter.generation_config = type(drafter.generation_config)()
        return target, drafter

    return make
