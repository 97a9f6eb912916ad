"""A drafter with a draft vocabulary: its loss is the whole one over these tokens alone, and training works on it."""

import copy
import math

import peft
import pytest
import torch
import torch.nn.functional as F

from hf_domino import DominoDraftModel
from hf_domino.training.blocks import make_blocks
from hf_domino.training.data import ShardDataset
from hf_domino.training.objective import block_loss
from hf_domino.training.run import FINAL, RunArguments, train
from hf_domino.training.trainer import DominoTrainer
from hf_domino.training.vocabulary import OutputVocabulary
from tests.tiny import VOCAB_SIZE, tiny_drafter, tiny_target

from .conftest import answers_mask, small_drafter, training_arguments

N, J = 6, 5
TOKENS = torch.tensor([3, 5, 8, 13, 21, 34, 55])


def restricted(drafter: DominoDraftModel, tokens: torch.Tensor = TOKENS) -> DominoDraftModel:
    drafter = copy.deepcopy(drafter)
    drafter.restrict_vocabulary(tokens)
    return drafter


@pytest.fixture
def frequent(dataset) -> torch.Tensor:
    """Three quarters of what the texts are made of."""
    counts = dataset.token_counts(VOCAB_SIZE)
    tokens = counts.topk(24).indices
    assert 0.6 < counts[tokens].sum() / counts.sum() < 0.98, "some labels lie outside"
    return tokens


@pytest.mark.parametrize("head_type", ["gru", "attention", "none"])
def test_the_loss_is_the_naive_one_over_the_sub_vocabulary(head_type):
    target = tiny_target()
    whole = tiny_drafter(target, head_type, pure_draft_prefix_len=1)
    drafter = restricted(whole)
    generator = torch.Generator().manual_seed(3)
    states = torch.randn(N, J, target.config.hidden_size, generator=generator)
    embeds = torch.randn(N, J, target.config.hidden_size, generator=generator)
    labels = TOKENS[torch.randint(0, len(TOKENS), (N, J), generator=generator)]
    labels[0, 0], labels[1, 2], labels[2, 4] = 4, 6, 7  # not in the vocabulary
    labels[3] = 9  # none of them is
    supervised = torch.arange(J) < torch.tensor([5, 5, 5, 5, 3, 5])[:, None]
    head = target.get_output_embeddings().weight
    vocabulary = OutputVocabulary.restricted(head, None, drafter.draft_token_ids)
    sums = block_loss(drafter, states, embeds, labels, supervised, vocabulary, 4.0)
    base = final = weight = 0.0
    accepted = [0, 0]
    for n in range(N):
        corrected = head @ states[n].T
        if head_type != "none":
            encoded = whole.prefix_encoder.encode(embeds[n : n + 1], states[n : n + 1])
            corrected = corrected + whole.embed_proj(torch.cat([states[n : n + 1], encoded], dim=-1))[0].T
        alive = [True, True]
        for j in range(J):
            inside = labels[n, j] in TOKENS
            if not supervised[n, j]:
                break
            pair = [(head @ states[n, j])[TOKENS], (corrected[:, j] if j >= 1 else head @ states[n, j])[TOKENS]]
            for i, logits in enumerate(pair):
                alive[i] &= bool(inside) and bool(TOKENS[logits.argmax()] == labels[n, j])
                accepted[i] += alive[i]
            if inside:
                label = (TOKENS == labels[n, j]).nonzero()[0]
                decay = math.exp(-j / 4.0)
                base += decay * F.cross_entropy(pair[0][None], label).item()
                final += decay * F.cross_entropy(pair[1][None], label).item()
                weight += decay
    assert sums.base.item() == pytest.approx(base, rel=1e-4)
    assert sums.final.item() == pytest.approx(final, rel=1e-4)
    assert sums.weight.item() == pytest.approx(weight, rel=1e-5)
    assert [sums.base_accepted.item(), sums.final_accepted.item()] == accepted
    assert sums.blocks.item() == N, "a block whose first token cannot be drafted counts as one that failed"


def test_drafts_after_an_undraftable_token_stay_supervised():
    ids = torch.tensor([[2, 3, 4, 5, 8, 13, 9]])
    draftable = torch.zeros(VOCAB_SIZE, dtype=torch.bool)
    draftable[TOKENS] = True
    mask, lengths, anchors = answers_mask(7, 1)[None], torch.tensor([7]), torch.tensor([[1, 5]])
    blocks = make_blocks(ids, mask, lengths, 4, anchors, torch.tensor([[True, True]]), draftable)
    assert blocks.supervised_BAJ[0].tolist() == [[False, True, True, True], [False, False, False, False]]
    assert blocks.real_BA.tolist() == [[True, True]]


@pytest.mark.parametrize("head_type", ["gru", "attention", "none"])
def test_training_lowers_the_loss(target, dataset, frequent, tmp_path, head_type):
    drafter = restricted(small_drafter(target, head_type), frequent)
    settings = dict(max_steps=30, base_share=0.1, handover_share=0.3, num_anchors=16, learning_rate=1e-2)
    trainer = DominoTrainer(drafter, target, training_arguments(tmp_path, **settings), dataset)
    trainer.train()
    found = [entry["final_loss"] for entry in trainer.state.log_history if "final_loss" in entry]
    assert sum(found[-5:]) / 5 < 0.93 * sum(found[:5]) / 5
    trainer.save_model()
    loaded = DominoDraftModel.from_pretrained(tmp_path, dtype=torch.float32)
    assert torch.equal(loaded.draft_token_ids, frequent.sort().values)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # raised inside peft
def test_adapters_train_on_it(target, dataset, frequent, tmp_path):
    drafter = restricted(small_drafter(target), frequent)
    wrapped = peft.get_peft_model(drafter, peft.LoraConfig(r=2, target_modules=["q_proj", "fc", "embed_proj.2"]))
    arguments = training_arguments(tmp_path, max_steps=3, base_share=0.0, handover_share=0.0)
    DominoTrainer(wrapped, target, arguments, dataset).train()
    added = {name: p for name, p in wrapped.named_parameters() if "lora_B" in name}
    assert {p.shape[0] for name, p in added.items() if "embed_proj" in name} == {len(frequent)}
    assert all(p.abs().sum() > 0 for p in added.values())


def test_a_sampled_softmax_on_top_is_refused(target, dataset, frequent, tmp_path):
    drafter = restricted(small_drafter(target), frequent)
    with pytest.raises(ValueError, match="draft vocabulary of 24 tokens.*frequent_tokens"):
        DominoTrainer(drafter, target, training_arguments(tmp_path, frequent_tokens=8), dataset)


def test_a_new_drafter_can_be_restricted_from_the_start(target, shards, tmp_path):
    settings = RunArguments(
        data=str(shards),
        drafter=["draft_vocab_size=20", "block_size=6", "num_hidden_layers=2", "head_rank=8", "head_hidden_size=32"],
    )
    train(settings, training_arguments(tmp_path / "a", max_steps=2), target)
    loaded = DominoDraftModel.from_pretrained(tmp_path / "a" / FINAL)
    wanted = ShardDataset(shards).token_counts(VOCAB_SIZE).topk(20).indices.sort().values
    assert torch.equal(loaded.draft_token_ids, wanted)
    again = RunArguments(data=str(shards), init_from=str(tmp_path / "a" / FINAL), draft_vocab_size=10)
    with pytest.raises(ValueError, match="20 tokens from the start"):
        train(again, training_arguments(tmp_path / "b", max_steps=2), target)
