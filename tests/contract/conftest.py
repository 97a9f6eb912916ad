"""What really happened in a call: without it, a test of equal outputs could pass because nothing was drafted."""

from collections import Counter

import pytest

from hf_domino.drafter import decoding_domino


@pytest.fixture
def happened(monkeypatch: pytest.MonkeyPatch) -> Counter:
    """Counts calls of our loop ("calls"), its rounds, accepted drafts, and rounds whose path was no chain ("moves")."""
    counts: Counter = Counter()
    original_loop, original_keep = decoding_domino.domino_decoding, decoding_domino.keep_path

    def loop(target, drafter, *args, **kwargs):
        counts["calls"] += 1
        result = original_loop(target, drafter, *args, **kwargs)
        counts["rounds"] += len(drafter.drafting_stats.accepted)
        counts["accepted"] += sum(drafter.drafting_stats.accepted)
        return result

    def keep(cache, length, num_nodes, paths):
        counts["moves"] += any(path != list(range(len(path))) for path in paths)
        return original_keep(cache, length, num_nodes, paths)

    monkeypatch.setattr(decoding_domino, "domino_decoding", loop)
    monkeypatch.setattr(decoding_domino, "keep_path", keep)
    return counts
