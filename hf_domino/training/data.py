"""Training text on disk: shards of token ids, loss masks and, if wanted, the target's tapped states and distributions.

A shard is one safetensors file of n concatenated sequences: `input_ids [N]`, `loss_mask [N]`, `offsets [n + 1]` and
optionally `tapped_states [N, M·H]` (bfloat16), the target's distribution after each token as its k most probable ones,
`teacher_ids [N, k]` and `teacher_probs [N, k]` (bfloat16; zeros where no answer's token follows), and `source_rows [n]`
(the prompts' numbers: what a resumed run skips).
`data.json` beside them tells where they come from.
"""

import gzip
import json
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset

SHARD_PATTERN = "shard-*.safetensors"
PROVENANCE = "data.json"
STORED = ("tapped_states", "teacher_ids", "teacher_probs")  # what a shard may hold besides the text


def chat_tokens(
    tokenizer, prompt: str | list[dict[str, str]], response: str | None = None, finished: bool = True
) -> tuple[list[int], list[int]]:
    """Token ids of a prompt under the chat template, and of its answer (empty when there is none).

    Prompt and answer are tokenised apart, so that the loss mask is exact whether or not the template marks what the
    assistant says. A finished answer ends with the tokenizer's end-of-sequence token.
    """
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    prompt_ids = tokenizer(text, add_special_tokens=False).input_ids
    if response is None:
        return prompt_ids, []
    answer_ids = tokenizer(response, add_special_tokens=False).input_ids
    return prompt_ids, answer_ids + ([tokenizer.eos_token_id] if finished else [])


class ShardDataset(Dataset):
    """Sequences of the shards of a folder. States and distributions are read from disk when a sequence is asked for.

    Args:
        folder: holds the shards.
        max_length: longer sequences are cut at the end.
        shards: which of the folder's shards, in order of their names; default: all.

    Raises:
        FileNotFoundError: the folder holds no shard.
    """

    def __init__(self, folder: str | Path, max_length: int | None = None, shards: slice = slice(None)):
        self.folder = Path(folder)
        self.max_length = max_length
        self.files = sorted(self.folder.glob(SHARD_PATTERN))[shards]
        if not self.files:
            raise FileNotFoundError(f"{folder} holds no {SHARD_PATTERN}; make some with scripts/prepare_data.py.")
        self._index: list[tuple[int, int, int]] = []
        self._tokens: list[tuple[torch.Tensor, torch.Tensor]] = []
        for number, file in enumerate(self.files):
            with safe_open(file, framework="pt") as shard:
                offsets = shard.get_tensor("offsets").tolist()
                self._tokens.append((shard.get_tensor("input_ids").long(), shard.get_tensor("loss_mask").bool()))
                names = set(shard.keys())
            self.stored = [name for name in STORED if name in names]
            self._index += [(number, a, b) for a, b in pairwise(offsets)]

    def __len__(self) -> int:
        return len(self._index)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        number, first, end = self._index[index]
        end = min(end, first + self.max_length) if self.max_length else end
        ids, mask = self._tokens[number]
        item = {"input_ids": ids[first:end], "loss_mask": mask[first:end], "index": torch.tensor(index)}
        if self.stored:
            with safe_open(self.files[number], framework="pt") as shard:
                item |= {name: shard.get_slice(name)[first:end] for name in self.stored}
        return item

    @property
    def has_states(self) -> bool:
        return "tapped_states" in self.stored

    @property
    def provenance(self) -> dict[str, Any]:
        """What `data.json` says, or nothing where there is none."""
        path = self.folder / PROVENANCE
        return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}

    @property
    def lengths(self) -> list[int]:
        limit = self.max_length or 1 << 60
        return [min(end - first, limit) for _, first, end in self._index]

    def token_counts(self, vocab_size: int) -> torch.Tensor:
        """How often each token occurs among the supervised ones, `[V]`."""
        counts = torch.zeros(vocab_size, dtype=torch.long)
        for ids, mask in self._tokens:
            counts += torch.bincount(ids[mask], minlength=vocab_size)
        return counts


def collate(items: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Right-pads a batch. Padding is never supervised, and nothing real attends to it."""
    batch = {}
    for key in items[0]:
        values = [item[key] for item in items]
        batch[key] = torch.stack(values) if values[0].ndim == 0 else pad_sequence(values, batch_first=True)
    batch["lengths"] = torch.tensor([len(item["input_ids"]) for item in items])
    return batch


def read_jsonl(path: str | Path) -> Iterator[dict[str, Any]]:
    """Rows of a JSONL file, gzipped if its name ends in `.gz`."""
    opener = gzip.open if str(path).endswith(".gz") else open
    with opener(path, "rt", encoding="utf-8") as lines:
        for line in lines:
            if line.strip():
                yield json.loads(line)
