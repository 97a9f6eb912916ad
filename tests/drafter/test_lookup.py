"""Branches from the text itself."""

from hypothesis import given
from hypothesis import strategies as st

from hf_domino.drafter.lookup_domino import TextLookup


def followed(text: list[int], max_ngram: int, max_tokens: int) -> tuple[list[int], int]:
    """The same by looking: the last place before the end where the longest n-gram stood."""
    for n in range(min(max_ngram, len(text)), 0, -1):
        for end in range(len(text) - 1, n - 1, -1):
            if text[end - n : end] == text[-n:]:
                return text[end : end + max_tokens], n
    return [], 0


@given(st.lists(st.integers(0, 3), max_size=30), st.integers(1, 4), st.integers(1, 5), st.integers(1, 7))
def test_the_continuation_of_the_longest_ngram_at_its_last_place(text, max_ngram, max_tokens, piece):
    lookup = TextLookup(max_ngram, max_tokens)
    for start in range(0, len(text), piece):  # in pieces, as a call brings it
        lookup.extend(text[start : start + piece])
    assert lookup.continuation() == followed(text, max_ngram, max_tokens)


def test_what_has_been_accepted_moves_the_estimate():
    lookup = TextLookup()
    assert lookup.token_probability(1) < lookup.token_probability(2) < lookup.token_probability(3)
    before = lookup.token_probability(2)
    lookup.record(2, offered=10, accepted=10)
    assert lookup.token_probability(2) > before
    lookup.record(2, offered=40, accepted=0)
    assert lookup.token_probability(2) < before
    assert lookup.token_probability(3) == TextLookup().token_probability(3)
