"""Branches from the text itself."""

from hypothesis import given
from hypothesis import strategies as st

from hf_domino.drafter.lookup_domino import TextLookup


def followed(text: list[int], max_ngram: int, max_tokens: int) -> tuple[list[int], int]:
    """The same by looking: the last place before the end where the longest n-gram stood, and how much matches there."""
    for n in range(min(max_ngram, len(text)), 0, -1):
        for end in range(len(text) - 1, n - 1, -1):
            if text[end - n : end] == text[-n:]:
                match = max(m for m in range(n, end + 1) if text[end - m : end] == text[-m:])
                return text[end : end + max_tokens], min(match, 16)
    return [], 0


@given(st.lists(st.integers(0, 3), max_size=30), st.integers(1, 4), st.integers(1, 5), st.integers(1, 7))
def test_the_continuation_of_the_longest_ngram_at_its_last_place(text, max_ngram, max_tokens, piece):
    lookup = TextLookup(max_ngram, max_tokens)
    for start in range(0, len(text), piece):  # in pieces, as a call brings it
        lookup.extend(text[start : start + piece])
    assert lookup.continuation() == followed(text, max_ngram, max_tokens)


@given(st.integers(10, 40), st.integers(0, 3))
def test_long_matches_are_counted_up_to_a_length(repeated, max_tokens):
    """Copied text: the n-gram looked up is short, the match behind it long."""
    text = list(range(repeated))
    lookup = TextLookup(3, 1 + max_tokens)
    lookup.extend(text + [99] + text[:-1])
    assert lookup.continuation() == (text[-1:] + ([99] + text)[:max_tokens], min(repeated - 1, 16))


def test_what_has_been_accepted_moves_the_estimate():
    lookup = TextLookup()
    estimates = [lookup.token_probability(match) for match in range(1, 20)]
    assert estimates == sorted(estimates) and estimates[0] < 0.3 and 0.9 < estimates[15] == estimates[18] < 1
    lookup.record(2, offered=10, accepted=10)
    assert all(lookup.token_probability(match) > estimates[match - 1] for match in range(2, 12))
    lookup.record(3, offered=4, accepted=3)  # the last one was wrong: it stood behind a match of six
    assert lookup.token_probability(6) < lookup.token_probability(5)
    for _ in range(40):
        lookup.record(2, offered=1, accepted=0)
    assert lookup.token_probability(2) < estimates[1]
    assert lookup.token_probability(1) == estimates[0]
