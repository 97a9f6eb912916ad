"""Branches from the text itself: what followed the last n-gram where it stood before (prompt lookup)."""

from collections.abc import Sequence


class TextLookup:
    """An index of the n-grams of one text, and how well their continuations have done in this call.

    Args:
        max_ngram: longest n-gram that is looked up; 0: none is.
        max_tokens: longest continuation that is offered.
    """

    def __init__(self, max_ngram: int = 3, max_tokens: int = 10):
        self.max_ngram = max_ngram
        self.max_tokens = max_tokens
        self.text: list[int] = []
        self._ends: dict[tuple[int, ...], int] = {}
        # Tokens offered and accepted by n-gram length; the prior says that a longer match is a better one.
        self._offered = dict.fromkeys(range(1, max_ngram + 1), 4.0)
        self._accepted = {n: 4.0 * n / (n + 2.0) for n in range(1, max_ngram + 1)}

    def extend(self, tokens: Sequence[int]) -> None:
        """Adds text."""
        for token in tokens:
            # Indexed one token late: the n-gram at the very end has no continuation yet.
            for n in range(1, min(self.max_ngram, len(self.text)) + 1):
                self._ends[tuple(self.text[-n:])] = len(self.text)
            self.text.append(token)

    def continuation(self) -> tuple[list[int], int]:
        """The tokens that followed the longest n-gram found before, and its length (0: none was found)."""
        for n in range(min(self.max_ngram, len(self.text)), 0, -1):
            end = self._ends.get(tuple(self.text[-n:]))
            if end is not None:
                return self.text[end : end + self.max_tokens], n
        return [], 0

    def token_probability(self, ngram: int) -> float:
        """How often a token offered after a match of this length became text."""
        return self._accepted[ngram] / self._offered[ngram]

    def record(self, ngram: int, offered: int, accepted: int) -> None:
        """Counts a branch of which `offered` tokens were verified up to and including the first wrong one."""
        self._offered[ngram] += offered
        self._accepted[ngram] += accepted
