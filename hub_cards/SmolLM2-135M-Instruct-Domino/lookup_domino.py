"""Branches from the text itself: what followed the last n-gram where it stood before (prompt lookup)."""

from collections.abc import Sequence

_LONGEST_MATCH = 16  # told apart from longer ones
_PRIOR_TOKENS = 4.0  # of a call's evidence, that weigh as much as the prior


class TextLookup:
    """An index of the n-grams of one text, and how well their continuations have done in this call.

    A token is offered because the tokens before it have stood together before. The longer that match, the likelier
    the token; so within a branch each token, once those before it are right, is likelier than the last.

    Args:
        max_ngram: longest n-gram that is looked up; 0: none is.
        max_tokens: longest continuation that is offered.
    """

    def __init__(self, max_ngram: int = 3, max_tokens: int = 10):
        self.max_ngram = max_ngram
        self.max_tokens = max_tokens
        self.text: list[int] = []
        self._ends: dict[tuple[int, ...], int] = {}
        # Tokens offered and accepted after matches of each length. The prior is what a target's answers showed
        # (docs/log.md): 0.23, 0.52, 0.61, 0.68, 0.71 after matches of 1 to 5 tokens, 0.85 after 10, 0.91 after 16.
        lengths = range(1, _LONGEST_MATCH + 1)
        self._offered = dict.fromkeys(lengths, _PRIOR_TOKENS)
        self._accepted = {n: _PRIOR_TOKENS * (n - 0.5) / (n + 1.0) for n in lengths}

    def extend(self, tokens: Sequence[int]) -> None:
        """Adds text."""
        for token in tokens:
            # Indexed one token late: the n-gram at the very end has no continuation yet.
            for n in range(1, min(self.max_ngram, len(self.text)) + 1):
                self._ends[tuple(self.text[-n:])] = len(self.text)
            self.text.append(token)

    def continuation(self) -> tuple[list[int], int]:
        """The tokens that followed the longest n-gram found before, and how many before them match (0: none was found).

        That is the n-gram, and what stands before it in both places as far as it is the same.
        """
        for match in range(min(self.max_ngram, len(self.text)), 0, -1):
            end = self._ends.get(tuple(self.text[-match:]))
            if end is not None:
                while match < min(end, _LONGEST_MATCH) and self.text[end - match - 1] == self.text[-match - 1]:
                    match += 1
                return self.text[end : end + self.max_tokens], match
        return [], 0

    def token_probability(self, match: int) -> float:
        """How often a token offered after a match of this length becomes text."""
        match = min(match, _LONGEST_MATCH)
        return self._accepted[match] / self._offered[match]

    def record(self, match: int, offered: int, accepted: int) -> None:
        """Counts a branch of which `offered` tokens were verified up to and including the first wrong one."""
        for i in range(offered):
            length = min(match + i, _LONGEST_MATCH)
            self._offered[length] += 1
            self._accepted[length] += i < accepted
