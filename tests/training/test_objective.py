"""The loss equals a loop over drafts; chunks and samples of the vocabulary change nothing."""

import math

import peft
import pytest
import torch
import torch.nn.functional as F

from hf_domino.training.objective import Teacher, block_loss, decay_weights, default_gamma, most_probable
from hf_domino.training.vocabulary import OutputVocabulary, head_matrix
from tests.tiny import VOCAB_SIZE, tiny_drafter, tiny_target

N, J = 7, 6


@pytest.fixture(scope="module")
def target():
    return tiny_target()


@pytest.fixture
def inputs(target):
    generator = torch.Generator().manual_seed(3)
    hidden = target.config.hidden_size
    states = torch.randn(N, J, hidden, generator=generator)
    embeds = torch.randn(N, J, hidden, generator=generator)
    labels = torch.randint(0, VOCAB_SIZE, (N, J), generator=generator)
    supervised = torch.arange(J) < torch.tensor([6, 6, 3, 1, 4, 6, 2])[:, None]
    return states, embeds, labels, supervised


def loss_of(drafter, inputs, vocabulary, lam=0.5, **more):
    states, embeds, true, supervised = inputs
    states = states.clone().requires_grad_()
    drafter.zero_grad()
    sums = block_loss(drafter, states, embeds, true, supervised, vocabulary, 4.0, **more)
    ((1 - lam) * sums.final + lam * sums.base).backward()
    gradients = [states.grad] + [p.grad for p in drafter.parameters() if p.grad is not None]
    return sums, gradients


@pytest.mark.parametrize("head_type", ["gru", "attention"])
@pytest.mark.parametrize("pure", [0, 1, 2])
def test_equals_a_loop_over_blocks_and_drafts(target, inputs, head_type, pure):
    drafter = tiny_drafter(target, head_type, pure_draft_prefix_len=pure)
    states, embeds, labels, supervised = inputs
    head = target.get_output_embeddings().weight
    sums, _ = loss_of(drafter, inputs, OutputVocabulary(head))
    base = final = weight = 0.0
    base_accepted = final_accepted = 0
    for n in range(N):
        base_alive = final_alive = True
        memory = drafter.prefix_encoder.start(1)
        for j in range(J):
            output, memory = drafter.prefix_encoder.step(embeds[n, j][None], states[n, j][None], memory)
            if not supervised[n, j]:
                break
            base_logits = head @ states[n, j]
            final_logits = base_logits
            if j >= pure:
                final_logits = base_logits + drafter.embed_proj(torch.cat([states[n, j], output[0]]))
            decay = math.exp(-j / 4.0)
            base += decay * F.cross_entropy(base_logits[None], labels[n, j][None]).item()
            final += decay * F.cross_entropy(final_logits[None], labels[n, j][None]).item()
            weight += decay
            base_alive &= bool(base_logits.argmax() == labels[n, j])
            final_alive &= bool(final_logits.argmax() == labels[n, j])
            base_accepted, final_accepted = base_accepted + base_alive, final_accepted + final_alive
    assert sums.base.item() == pytest.approx(base, rel=1e-4)
    assert sums.final.item() == pytest.approx(final, rel=1e-4)
    assert sums.weight.item() == pytest.approx(weight, rel=1e-5)
    assert (sums.base_accepted.item(), sums.final_accepted.item()) == (base_accepted, final_accepted)
    assert sums.blocks.item() == N


def test_accepted_drafts_are_counted_up_to_the_first_wrong_one(target):
    drafter = tiny_drafter(target, "none")
    head = target.get_output_embeddings().weight
    states = torch.randn(1, 4, target.config.hidden_size)
    labels = (states @ head.T).argmax(-1)
    labels[0, 2] = (labels[0, 2] + 1) % VOCAB_SIZE
    supervised = torch.ones(1, 4, dtype=torch.bool)
    sums = block_loss(drafter, states, states, labels, supervised, OutputVocabulary(head), 4.0)
    assert sums.base_accepted == sums.final_accepted == 2


@pytest.mark.parametrize("head_type", ["gru", "attention", "none"])
def test_chunks_change_neither_loss_nor_gradients(target, inputs, head_type):
    drafter = tiny_drafter(target, head_type)
    vocabulary = OutputVocabulary(target.get_output_embeddings().weight)
    whole, gradients = loss_of(drafter, inputs, vocabulary, chunk_blocks=100)
    chunked, chunked_gradients = loss_of(drafter, inputs, vocabulary, chunk_blocks=2)
    torch.testing.assert_close(vars(chunked), vars(whole))
    assert len(gradients) == len(chunked_gradients) > 0
    torch.testing.assert_close(chunked_gradients, gradients)


def test_a_sample_of_everything_is_the_whole_vocabulary(target, inputs):
    drafter = tiny_drafter(target)
    head = target.get_output_embeddings().weight
    whole, gradients = loss_of(drafter, inputs, OutputVocabulary(head))
    vocabulary = OutputVocabulary.sampled(head, None, inputs[2].flatten(), VOCAB_SIZE)
    sampled, sampled_gradients = loss_of(drafter, inputs, vocabulary)
    torch.testing.assert_close(vars(sampled), vars(whole))
    torch.testing.assert_close(sampled_gradients, gradients, atol=1e-5, rtol=1e-4)


def test_the_sampled_partition_function_is_unbiased(target, inputs):
    head = target.get_output_embeddings().weight
    states, _, labels, _ = inputs
    states, labels = states[:1] * 0.3, labels[:1]
    wanted = (states @ head.T).exp().sum(-1)
    found = []
    for seed in range(400):
        generator = torch.Generator().manual_seed(seed)
        certain = torch.cat([torch.tensor([3, 4]), labels.flatten()])
        vocabulary = OutputVocabulary.sampled(head, None, certain, 15, generator)
        assert torch.equal(vocabulary.token_ids[vocabulary.index(labels)], labels)
        assert vocabulary.token_ids.unique().numel() == vocabulary.token_ids.numel()
        found.append(vocabulary.base_logits(states).exp().sum(-1))
    found = torch.stack(found)
    error = (found.mean(0) - wanted).abs() / (found.std(0) / len(found) ** 0.5)
    assert error.max() < 4, "more than four standard errors off"
    assert (found.mean(0) / wanted - 1).abs().max() < 0.1


def test_base_and_head_can_be_left_out(target, inputs):
    drafter = tiny_drafter(target)
    vocabulary = OutputVocabulary(target.get_output_embeddings().weight)
    full, _ = loss_of(drafter, inputs, vocabulary)
    without_head, gradients = loss_of(drafter, inputs, vocabulary, lam=1.0, with_head=False)
    assert without_head.base == full.base == without_head.final
    assert len(gradients) == 1, "the head has no part in it"
    _, final_only = loss_of(drafter, inputs, vocabulary, lam=0.0)
    without_base, skipped = loss_of(drafter, inputs, vocabulary, lam=0.0, with_base=False)
    assert without_base.base == full.base, "still measured"
    torch.testing.assert_close(skipped, final_only)


def test_without_a_head_the_base_loss_trains_to_the_end(target, inputs):
    drafter = tiny_drafter(target, "none")
    vocabulary = OutputVocabulary(target.get_output_embeddings().weight)
    _, gradients = loss_of(drafter, inputs, vocabulary, lam=0.0, with_base=False)
    _, wanted = loss_of(drafter, inputs, vocabulary, lam=1.0)
    torch.testing.assert_close(gradients, wanted)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # raised inside peft
def test_adapters_on_the_head_are_trained_under_a_sampled_softmax(target, inputs):
    drafter = tiny_drafter(target)
    config = peft.LoraConfig(r=2, target_modules=["embed_proj.2"], init_lora_weights=False)
    wrapped = peft.get_peft_model(drafter, config)
    head = target.get_output_embeddings().weight
    whole, _ = loss_of(drafter, inputs, OutputVocabulary(head))
    vocabulary = OutputVocabulary.sampled(head, None, inputs[2].flatten(), VOCAB_SIZE)
    sampled, _ = loss_of(drafter, inputs, vocabulary)
    torch.testing.assert_close(sampled.final, whole.final)
    trained = [p for p in wrapped.parameters() if p.requires_grad]
    assert len(trained) == 2
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in trained)
    with wrapped.disable_adapter():
        plain, _ = loss_of(drafter, inputs, vocabulary)
    assert not torch.isclose(plain.final, whole.final), "the adapter must matter for this test to mean anything"


def test_a_biased_or_adapted_output_head_is_seen_whole():
    head = torch.nn.Linear(8, 20)
    states = torch.randn(3, 8)
    weight, bias = head_matrix(head)
    torch.testing.assert_close(OutputVocabulary(weight, bias).base_logits(states), head(states))
    model = torch.nn.Sequential(head)
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["0"], init_lora_weights=False))
    layer = adapted.base_model.model[0]
    weight, bias = head_matrix(layer)
    torch.testing.assert_close(OutputVocabulary(weight, bias).base_logits(states), layer(states))


def test_decay():
    torch.testing.assert_close(decay_weights(3, 4.0), torch.tensor([1.0, math.exp(-0.25), math.exp(-0.5)]))
    assert (default_gamma(16), default_gamma(8)) == (7.0, 4.0)


@pytest.mark.parametrize("head_type", ["gru", "none"])
def test_kl_equals_a_loop(target, inputs, head_type):
    drafter = tiny_drafter(target, head_type, pure_draft_prefix_len=1)
    states, embeds, labels, supervised = inputs
    head = target.get_output_embeddings().weight
    teacher = most_probable(torch.randn(N, J, VOCAB_SIZE, generator=torch.Generator().manual_seed(5)) * 2, 6)
    sums, _ = loss_of(drafter, inputs, OutputVocabulary(head), teacher=teacher)
    base_logits = states @ head.T
    final_logits = base_logits
    if head_type != "none":
        encoded = drafter.prefix_encoder.encode(embeds, states)
        final_logits = base_logits + drafter.embed_proj(torch.cat([states, encoded], dim=-1))
        final_logits[:, 0] = base_logits[:, 0]
    wanted = []
    for logits in (base_logits, final_logits):
        total = 0.0
        for n, j in supervised.nonzero().tolist():
            p = teacher.probs[n, j] / teacher.probs[n, j].sum()
            q = logits[n, j].softmax(-1)[teacher.ids[n, j]]
            total += math.exp(-j / 4.0) * (p * (p / q).log()).sum().item()
        wanted.append(total)
    assert [sums.base.item(), sums.final.item()] == pytest.approx(wanted, rel=1e-4)
    plain, _ = loss_of(drafter, inputs, OutputVocabulary(head))
    assert (sums.final_accepted, sums.weight) == (plain.final_accepted, plain.weight)


def test_kl_to_one_sure_token_is_cross_entropy(target, inputs):
    drafter = tiny_drafter(target)
    vocabulary = OutputVocabulary(target.get_output_embeddings().weight)
    sure = Teacher(torch.stack([inputs[2], inputs[2]], -1), torch.tensor([1.0, 0.0]).expand(N, J, 2))
    plain, gradients = loss_of(drafter, inputs, vocabulary)
    found, same = loss_of(drafter, inputs, vocabulary, teacher=sure, chunk_blocks=2)
    torch.testing.assert_close(vars(found), vars(plain))
    torch.testing.assert_close(same, gradients)


def test_kl_vanishes_where_the_drafter_is_the_teacher(target, inputs):
    drafter = tiny_drafter(target, "none")
    head = target.get_output_embeddings().weight
    teacher = most_probable(inputs[0] @ head.T, VOCAB_SIZE)
    sums, gradients = loss_of(drafter, inputs, OutputVocabulary(head), teacher=teacher)
    assert sums.base.abs() < 1e-4
    assert gradients[0].abs().max() < 1e-4


def test_kl_over_a_draft_vocabulary_leaves_the_other_tokens_out(target, inputs):
    drafter = tiny_drafter(target)
    tokens = torch.arange(0, VOCAB_SIZE, 2)
    drafter.restrict_vocabulary(tokens)
    states, embeds, labels, supervised = inputs
    inputs = (states, embeds, labels // 2 * 2, supervised)
    vocabulary = OutputVocabulary.restricted(target.get_output_embeddings().weight, None, drafter.draft_token_ids)
    ids = torch.stack([inputs[2], labels // 2 * 2 + 1, (labels // 2 * 2 + 2) % 60], -1)
    mixed = Teacher(ids, torch.tensor([0.3, 0.4, 0.1]).expand(N, J, 3))
    inside = Teacher(ids[..., [0, 2]], torch.tensor([0.75, 0.25]).expand(N, J, 2))
    found, _ = loss_of(drafter, inputs, vocabulary, teacher=mixed)
    wanted, _ = loss_of(drafter, inputs, vocabulary, teacher=inside)
    torch.testing.assert_close(vars(found), vars(wanted))
    assert found.final.isfinite() and found.final > 0


def test_the_most_probable_tokens():
    logits = torch.randn(3, 5, 40).bfloat16()
    ids, probs = most_probable(logits, 7)
    whole = logits.float().softmax(-1)
    torch.testing.assert_close(probs, whole.gather(-1, ids))
    assert torch.equal(probs, probs.sort(-1, descending=True).values)
    torch.testing.assert_close(most_probable(logits, 100).probs.sum(-1), torch.ones(3, 5))
