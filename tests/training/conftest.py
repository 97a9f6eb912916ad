"""A tiny language and its shards: the target's own sampled text, so that what follows depends on the token before."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from hf_domino import DominoConfig, DominoDraftModel
from hf_domino.training.blocks import Blocks, make_blocks
from hf_domino.training.data import ShardDataset
from hf_domino.training.trainer import DominoTrainingArguments
from tests.tiny import VOCAB_SIZE, prompt_ids, tiny_target

PROMPT = 3


def small_drafter(target, head_type: str = "gru", seed: int = 0, **overrides) -> DominoDraftModel:
    """A drafter as training starts it: small weights, and a head that corrects nothing yet."""
    fields = dict(block_size=6, num_hidden_layers=2, head_rank=16, head_hidden_size=32, candidate_pool_size=None)
    torch.manual_seed(seed)
    return DominoDraftModel(DominoConfig.for_target(target.config, head_type=head_type, **(fields | overrides)))


def write_shard(folder: Path, texts: list[torch.Tensor], masks: list[torch.Tensor], **more: torch.Tensor) -> Path:
    """One shard of these sequences."""
    folder.mkdir(parents=True, exist_ok=True)
    lengths = torch.tensor([0, *(len(text) for text in texts)])
    tensors = {
        "input_ids": torch.cat(texts).int(),
        "loss_mask": torch.cat(masks).to(torch.uint8),
        "offsets": lengths.cumsum(0),
    }
    save_file(tensors | more, folder / "shard-00000.safetensors")
    return folder


def answers_mask(length: int, prompt: int = PROMPT) -> torch.Tensor:
    return torch.arange(length) >= prompt


def training_arguments(folder, **overrides) -> DominoTrainingArguments:
    fields = dict(
        output_dir=str(folder),
        max_steps=6,
        per_device_train_batch_size=4,
        learning_rate=3e-3,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        num_anchors=6,
        use_cpu=True,
        disable_tqdm=True,
        base_share=0.3,
        handover_share=0.4,
    )
    return DominoTrainingArguments(**(fields | overrides))


def blocks_at(ids: torch.Tensor, mask: torch.Tensor, anchors: torch.Tensor, num_drafts: int) -> Blocks:
    lengths = torch.full((ids.shape[0],), ids.shape[1])
    return make_blocks(ids, mask, lengths, num_drafts, anchors, torch.ones_like(anchors, dtype=torch.bool))


@pytest.fixture(scope="session")
def target():
    """Its next token follows mostly, but not only, from the last one."""
    return tiny_target(context=0.3)


@pytest.fixture(scope="session")
def texts(target) -> torch.Tensor:
    """96 samples of its text, `[96, 40]`."""
    torch.manual_seed(0)
    ids = prompt_ids(PROMPT, 5, batch=96)
    return target.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=True,
        top_k=0,
        temperature=0.4,
        max_new_tokens=37,
        eos_token_id=None,
    )


@pytest.fixture(scope="session")
def shards(texts, tmp_path_factory) -> Path:
    """The same, as a folder of shards."""
    masks = [answers_mask(texts.shape[1])] * len(texts)
    return write_shard(tmp_path_factory.mktemp("shards"), list(texts), masks)


@pytest.fixture
def dataset(shards) -> ShardDataset:
    return ShardDataset(shards)


CHAT_TEMPLATE = (
    "{% for message in messages %}{{ 'w4' if message['role'] == 'user' else 'w5' }} {{ message['content'] }} w6 "
    "{% endfor %}{% if add_generation_prompt %}w5{% endif %}"
)


def word_tokenizer(vocab_size: int = VOCAB_SIZE) -> PreTrainedTokenizerFast:
    """Words `w2`, `w4`, ... by number; 0, 1 and 3 are special. In the template w4 opens a user turn, w5 an answer, and
    w6 ends both."""
    special = {0: "<pad>", 1: "<end>", 3: "<unknown>"}
    words = Tokenizer(models.WordLevel({special.get(i, f"w{i}"): i for i in range(vocab_size)}, unk_token="<unknown>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, unk_token="<unknown>", pad_token="<pad>", eos_token="<end>"
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer
