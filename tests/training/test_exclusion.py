"""Training prompts that share text with evaluation prompts are found."""

import pytest

from hf_domino.training.exclusion import Exclusion

LONG = (
    "Janet has twelve ducks that lay sixteen eggs a day; she eats three and bakes four, and sells the rest at two "
    "dollars each."
)


@pytest.mark.parametrize(
    ("prompt", "shared"),
    [
        (LONG, True),
        (LONG.upper().replace(";", " -- "), True),
        ("Solve this. " + " ".join(LONG.split()[3:17]) + " What then?", True),
        ("Solve this. " + " ".join(LONG.split()[3:15]) + " What then?", False),
        ("Write a poem about the sea.", True),
        ("Please write a poem about the sea, at night!", True),
        ("Write a poem about the river.", False),
        ("Hello there", True),
        ("Hello there, how are you today?", False),
        ("", False),
    ],
)
def test_shared_text(prompt, shared):
    exclusion = Exclusion([LONG, "Write a poem about the sea.", "hello there"])
    assert exclusion.count == 3
    assert exclusion.shares(prompt) is shared


def test_without_evaluation_prompts_nothing_is_shared():
    assert not Exclusion([]).shares(LONG)
