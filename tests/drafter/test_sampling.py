"""Sampling through transformers' loop: chi-square tests against the exact distribution.

A target whose layers add nothing draws each token from a distribution that only the last token decides, known exactly.
One long text then gives hundreds of draws from each, many of them accepted drafts.
"""

import pytest
import torch
from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from tests.tiny import drafted_text, prompt_ids, skilled_drafter, tiny_target

pytestmark = pytest.mark.usefixtures("transformers_loop")
VOCAB, DRAWS = 7, 400


def chi_square(text: list[int], probabilities: torch.Tensor) -> tuple[float, int]:
    """p-value of a text under a table of next-token probabilities `[V, V]`, and the degrees of freedom.

    Cells that expect fewer than five draws are merged, row by row.
    """
    counts = torch.zeros_like(probabilities)
    for last, token in zip(text, text[1:]):
        counts[last, token] += 1
    assert counts[probabilities == 0].sum() == 0, "a token that cannot be drawn was drawn"
    statistic, freedom = 0.0, 0
    for row, found in zip(probabilities, counts, strict=True):
        expected = row * found.sum()
        small = expected < 5
        wanted = torch.cat([expected[~small], expected[small].sum()[None]])
        seen = torch.cat([found[~small], found[small].sum()[None]])
        seen, wanted = seen[wanted >= 1], wanted[wanted >= 1]
        statistic += float(((seen - wanted) ** 2 / wanted).sum())
        freedom += max(0, len(wanted) - 1)
    half = torch.tensor([freedom / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1])), freedom


@pytest.fixture(scope="module")
def bigram_pair():
    target = tiny_target(vocab_size=VOCAB, context=0.0, num_hidden_layers=1, eos_token_id=None)
    target.lm_head.weight.mul_(0.8)
    drafter = skilled_drafter(target, mask_token_id=0)
    drafter.generation_config.num_assistant_tokens_schedule = "constant"
    return target, drafter


def table(target, *warpers) -> torch.Tensor:
    """The exact next-token probabilities after each token, processed as `generate` does."""
    ids = torch.arange(VOCAB)[:, None]
    with torch.no_grad():
        logits = target(ids).logits[:, -1].double()
    return LogitsProcessorList(warpers)(ids, logits).softmax(-1)


SETTINGS = {
    "plain": (dict(temperature=1.0, top_k=0), []),
    "cool": (dict(temperature=0.6, top_k=0), [TemperatureLogitsWarper(0.6)]),
    "hot": (dict(temperature=1.7, top_k=0), [TemperatureLogitsWarper(1.7)]),
    "top_k": (dict(temperature=1.3, top_k=3), [TemperatureLogitsWarper(1.3), TopKLogitsWarper(3)]),
    "top_p": (dict(temperature=1.0, top_k=0, top_p=0.8), [TopPLogitsWarper(0.8)]),
}


def draw(pair, **arguments):
    target, drafter = pair
    torch.manual_seed(11)
    ids = prompt_ids(1, vocab_size=VOCAB)
    text = drafted_text(target, drafter, ids, do_sample=True, max_new_tokens=DRAWS, eos_token_id=None, **arguments)
    assert sum(drafter.drafting_stats.accepted) > DRAWS // 10
    return text[0].tolist()


@pytest.mark.parametrize("name", SETTINGS)
def test_sampled_tokens_follow_the_targets_distribution(name, bigram_pair):
    arguments, warpers = SETTINGS[name]
    p, freedom = chi_square(draw(bigram_pair, **arguments), table(bigram_pair[0], *warpers))
    assert freedom >= 6 and p > 1e-3


def test_the_chi_square_test_would_notice(bigram_pair):
    """A temperature that is ignored fails it."""
    text, target = draw(bigram_pair, temperature=1.0, top_k=0), bigram_pair[0]
    for temperature in (0.6, 1.7):
        assert chi_square(text, table(target, TemperatureLogitsWarper(temperature)))[0] < 1e-4
