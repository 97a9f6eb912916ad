"""How much each draft of a block counts in the loss. One function a rule, all of one form.

A rule takes, per block and draft (`[N, J]`): the drafter's probability of the true token, whether that token is its
first choice, which drafts are supervised, and the decay weights `[J]`; it returns weights `[N, J]` without gradient.
The loss stays divided by the sum of the decay weights, which all processes know before the forward: a rule says which
drafts count more than others, and the optimizer (AdamW) is indifferent to the common scale.
"""

from collections.abc import Callable

import torch

PositionWeights = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def decay(
    probabilities_NJ: torch.Tensor, correct_NJ: torch.Tensor, supervised_NJ: torch.Tensor, decay_J: torch.Tensor
) -> torch.Tensor:
    """`exp(-k / gamma)`, whatever the drafter does (DFlash, arXiv:2602.06036)."""
    return decay_J * supervised_NJ


def accept_until_fail(
    probabilities_NJ: torch.Tensor, correct_NJ: torch.Tensor, supervised_NJ: torch.Tensor, decay_J: torch.Tensor
) -> torch.Tensor:
    """Decay weights up to the first draft that is wrong, that one included: verification would drop the rest
    (Spec-AUF, arXiv:2607.01893)."""
    reached, _ = _reached_and_right(correct_NJ, supervised_NJ)
    return decay_J * supervised_NJ * reached


def first_error(
    probabilities_NJ: torch.Tensor, correct_NJ: torch.Tensor, supervised_NJ: torch.Tensor, decay_J: torch.Tensor
) -> torch.Tensor:
    """Decay weights, three times as large at the first draft that is wrong: the one that ends the accepted prefix
    (after arXiv:2606.11552)."""
    reached, right = _reached_and_right(correct_NJ, supervised_NJ)
    return decay_J * supervised_NJ * (1 + 2 * (reached - right))


def expected_length(
    probabilities_NJ: torch.Tensor, correct_NJ: torch.Tensor, supervised_NJ: torch.Tensor, decay_J: torch.Tensor
) -> torch.Tensor:
    """What a draft's log-probability adds to the expected accepted length, instead of a decay: the sum over all
    lengths that reach it of the probability of getting that far. Probabilities are drawn half way to 1, so that late
    drafts get a gradient before the early ones are good (D-PACE, arXiv:2605.18810)."""
    smoothed = 0.5 + 0.5 * probabilities_NJ * supervised_NJ
    reach = smoothed.cumprod(-1) * supervised_NJ
    return reach.flip(-1).cumsum(-1).flip(-1) * supervised_NJ


def _reached_and_right(correct_NJ: torch.Tensor, supervised_NJ: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """1 where verification gets to a draft, and 1 where it accepts it."""
    right = (correct_NJ & supervised_NJ).long().cumprod(-1)
    return torch.cat([torch.ones_like(right[:, :1]), right[:, :-1]], dim=-1), right


POSITION_WEIGHTS: dict[str, PositionWeights] = {
    "decay": decay,
    "accept_until_fail": accept_until_fail,
    "first_error": first_error,
    "expected_length": expected_length,
}
