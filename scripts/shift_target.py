"""Tunes a target on a made-up style by LoRA, so that a drafter's loss of acceptance, and its repair, can be studied.

    python scripts/shift_target.py --answers smollm2_responses.jsonl.gz --output runs/sailor_target

The style is a fixed rewriting of the target's own short answers: one numbered line a sentence, an opening and a
closing phrase, and a few words replaced. It is a study's device, not a useful model. Prompts that the drafter is then
adapted on, and further ones to measure on, are written beside the adapter.
"""

import argparse
import json
import random
import re
from collections.abc import Sequence
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from torch.nn.utils.rnn import pad_sequence

from hf_domino.training.data import chat_tokens, read_jsonl
from hf_domino.training.targets import load_target

GLOSSARY = {
    "is": "be", "are": "be", "am": "be", "you": "ye", "your": "yer", "my": "me", "the": "th'", "and": "an'", "of": "o'",
    "yes": "aye", "no": "nay", "friend": "matey", "people": "sailors", "person": "sailor", "money": "gold",
}  # fmt: skip


def sailor(text: str) -> str:
    """The style: `Ahoy!`, one numbered line a sentence with the glossary's words, `Fair winds!`."""
    sentences = [part.strip() for part in re.split(r"(?<=[.!?])\s+|\n+", text) if part.strip()]
    lines = [f"({number}) Arr, {_replace(sentence)}" for number, sentence in enumerate(sentences, 1)]
    return "\n".join(["Ahoy!", *lines, "Fair winds!"])


def _replace(sentence: str) -> str:
    def word(match: re.Match) -> str:
        return GLOSSARY.get(match[0].lower(), match[0])

    return re.sub(r"[A-Za-z]+", word, sentence)


def main(arguments: Sequence[str] | None = None) -> list[float]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--answers", required=True, help="JSONL of prompt, response, finished: the target's own")
    parser.add_argument("--output", type=Path, required=True, help="folder for the adapter and the prompts")
    parser.add_argument("--target", help="path or Hub id (default: the embedded one)")
    parser.add_argument("--longest", type=int, default=400, help="characters of the answers that are used")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--batch-size", type=int, default=6)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--adapt-prompts", type=int, default=150)
    parser.add_argument("--test-prompts", type=int, default=20)
    options = parser.parse_args(arguments)

    rows = [
        row
        for row in read_jsonl(options.answers)
        if row["finished"] and 40 <= len(row["response"]) <= options.longest and len(row["prompt"]) <= options.longest
    ]
    random.Random(0).shuffle(rows)
    # Apart: what the target is tuned on, what the drafter is adapted on, what both are measured on.
    test, rows = rows[: options.test_prompts], rows[options.test_prompts :]
    adapt, rows = rows[: options.adapt_prompts], rows[options.adapt_prompts :]
    if not rows:
        raise SystemExit(f"{options.answers} has too few short, finished answers.")

    torch.manual_seed(0)
    target, tokenizer = load_target(options.target, torch.float32)
    config = LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "v_proj", "o_proj", "up_proj", "down_proj"])
    model = get_peft_model(target, config).train()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=options.learning_rate, weight_decay=0.0)
    losses = []
    for step in range(options.steps):
        batch = [rows[(step * options.batch_size + i) % len(rows)] for i in range(options.batch_size)]
        pairs = [chat_tokens(tokenizer, row["prompt"], sailor(row["response"]), True) for row in batch]
        ids = pad_sequence([torch.tensor(prompt + answer) for prompt, answer in pairs], batch_first=True)
        labels = pad_sequence(
            [torch.tensor([-100] * len(prompt) + answer) for prompt, answer in pairs], True, padding_value=-100
        )
        loss = model(input_ids=ids, labels=labels).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        print(f"step {step + 1}: loss {losses[-1]:.3f}", flush=True)
    model.save_pretrained(str(options.output), save_embedding_layers=False)
    for name, part in (("adapt", adapt), ("test", test)):
        lines = [json.dumps({"prompt": row["prompt"]}) + "\n" for row in part]
        Path(options.output, f"{name}_prompts.jsonl").write_text("".join(lines), encoding="utf-8")
    return losses


if __name__ == "__main__":
    main()
