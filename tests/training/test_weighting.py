"""Position weights equal their definitions, and reach the loss."""

import pytest
import torch

from hf_domino.training.objective import block_loss, decay_weights
from hf_domino.training.vocabulary import OutputVocabulary
from hf_domino.training.weighting import POSITION_WEIGHTS
from tests.tiny import tiny_drafter, tiny_target

DECAY = decay_weights(4, 3.0)
PROBABILITIES = torch.tensor([[0.9, 0.2, 0.5, 0.7], [0.4, 0.4, 0.4, 0.4]])
CORRECT = torch.tensor([[True, False, True, True], [True, True, True, True]])
SUPERVISED = torch.tensor([[True, True, True, True], [True, True, False, False]])


def weights(name: str) -> torch.Tensor:
    return POSITION_WEIGHTS[name](PROBABILITIES, CORRECT, SUPERVISED, DECAY)


def test_decay():
    torch.testing.assert_close(weights("decay"), DECAY * SUPERVISED)


def test_accept_until_fail_ends_with_the_first_error():
    wanted = DECAY * torch.tensor([[1.0, 1.0, 0.0, 0.0], [1.0, 1.0, 0.0, 0.0]])
    torch.testing.assert_close(weights("accept_until_fail"), wanted)


def test_first_error_counts_more_and_the_end_of_the_text_is_none():
    wanted = DECAY * torch.tensor([[1.0, 3.0, 1.0, 1.0], [1.0, 1.0, 0.0, 0.0]])
    torch.testing.assert_close(weights("first_error"), wanted)


def test_expected_length_is_the_gradient_of_the_smoothed_expected_length():
    """d(sum over lengths of the product of probabilities) / d(log of each)."""
    logs = (0.5 + 0.5 * PROBABILITIES).log().requires_grad_()
    for row, length in enumerate((4, 2)):
        logs.cumsum(-1).exp()[row, :length].sum().backward()
    torch.testing.assert_close(weights("expected_length"), logs.grad)


@pytest.mark.parametrize("name", list(POSITION_WEIGHTS))
def test_the_loss_is_weighted_by_the_rule(name):
    target = tiny_target()
    drafter = tiny_drafter(target, "none")
    head = target.get_output_embeddings().weight
    generator = torch.Generator().manual_seed(1)
    states = torch.randn(5, 4, target.config.hidden_size, generator=generator, requires_grad=True)
    logits = (states @ head.T).detach()
    labels = logits.argmax(-1)
    labels[0, 1], labels[1, 3], labels[2, 0] = 3, 4, 5
    supervised = torch.arange(4) < torch.tensor([4, 4, 3, 1, 4])[:, None]
    rule = POSITION_WEIGHTS[name]
    vocabulary = OutputVocabulary(head)
    sums = block_loss(drafter, states, states, labels, supervised, vocabulary, 3.0, position_weights=rule)
    probabilities = logits.softmax(-1).gather(-1, labels[..., None])[..., 0]
    expected = rule(probabilities, logits.argmax(-1) == labels, supervised, DECAY)
    torch.testing.assert_close(sums.base, -(probabilities.log() * expected).sum(), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(sums.weight, (DECAY * supervised).sum())
    (gradient,) = torch.autograd.grad(sums.base, states)
    assert torch.equal(gradient.abs().sum(-1) > 0, expected > 0)
