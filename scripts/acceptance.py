"""Accepted lengths of several drafters on the same prompts, always drafting, and whether the output stayed the same.

    python scripts/acceptance.py --prompts gsm8k_test.jsonl scripts/everyday_prompts.jsonl --limit 20 \
        --drafters stock=hub_cards/SmolLM2-135M-Instruct-Domino adapted=runs/gsm8k_lora/final --output record.json

A drafter is a folder or a Hub id, of a whole drafter or of a PEFT adapter for one. Settings of a whole one may follow
in brackets: `chain=FOLDER[max_tree_width=1,draft_sources=drafter]`. Timing has no say in the figures.
The same call again goes on where it was broken off, and drafters can be added.
"""

import argparse
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel

from hf_domino.drafter.target_domino import unwrap
from hf_domino.evaluation.measuring import measure
from hf_domino.evaluation.methods import Method
from hf_domino.evaluation.prompts import conversation_ids, read_prompts
from hf_domino.evaluation.variants import parse_changes, variant
from hf_domino.training.lora import load_drafter
from hf_domino.training.targets import load_target

PLAIN = "plain"


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    options = parse(arguments)
    torch.set_num_threads(options.threads)
    dtype = getattr(torch, options.dtype)
    target, tokenizer = load_target(options.model, dtype, options.target_adapter)
    methods = {PLAIN: Method()}
    for label, path in options.drafters.items():
        drafter = _load(label, path, dtype)
        unwrap(drafter).generation_config.num_assistant_tokens_schedule = "constant"
        methods[label] = Method({"assistant_model": drafter}, unwrap(drafter))
    record = _begin(options)
    done = {(row["prompt"], row["drafter"]) for row in record["rows"]}
    for prompt in read_prompts(options.prompts, options.limit):
        for label, method in methods.items():
            if (prompt.hash, label) in done:
                continue
            ids = conversation_ids(tokenizer, [prompt.turns[0]], [])
            found = measure(target, method, [ids], max_new_tokens=options.max_new_tokens, do_sample=False)
            record["rows"].append(
                {
                    "set": prompt.set,
                    "prompt": prompt.hash,
                    "drafter": label,
                    "tokens": found.tokens[0],
                    "accepted": found.accepted,
                }
            )
            options.output.write_text(json.dumps(record) + "\n", encoding="utf-8")
    record["summary"] = summarise(record["rows"])
    options.output.write_text(json.dumps(record) + "\n", encoding="utf-8")
    for name, figures in record["summary"].items():
        print(f"{name}:")
        for label, values in figures.items():
            print(
                f"  {label:16} {values['acceptance_length']:.3f} tokens per forward ({values['ratio']:.3f} of the "
                f"first), same tokens in {values['identical']} of {values['prompts']}"
            )
    return record


def _load(label: str, path: str, dtype: torch.dtype) -> Any:
    settings = re.fullmatch(r"(.+?)\[([^\[\]]*)\]", path)
    if settings is None:
        return load_drafter(path, dtype)
    path, changes = settings.groups()
    drafter = load_drafter(path, dtype)
    if isinstance(drafter, PeftModel):
        raise ValueError(f"{label}: settings in brackets are for whole drafters; {path} is an adapter.")
    return variant(drafter, **parse_changes(label, changes))


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", nargs="+", required=True, metavar="FILE.jsonl", help="each file is a set")
    parser.add_argument("--drafters", nargs="+", required=True, metavar="LABEL=PATH", help="the first is compared with")
    parser.add_argument("--output", type=Path, required=True, metavar="RECORD.json")
    parser.add_argument("--limit", type=int, help="at most this many prompts of each set, the first ones")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--model", help="target: folder or Hub id, also of a PEFT adapter (default: the embedded one)")
    parser.add_argument("--target-adapter", help="PEFT adapter of the target")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "float16"))
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args(arguments)
    pairs = [entry.partition("=")[::2] for entry in options.drafters]
    if not all(label and path and label != PLAIN for label, path in pairs):
        parser.error(f"--drafters takes LABEL=PATH (no label {PLAIN}), got {' '.join(options.drafters)}")
    options.drafters = dict(pairs)
    return options


def summarise(rows: list[dict[str, Any]]) -> dict[str, dict[str, dict[str, Any]]]:
    """By set and drafter: tokens per target forward (prefills not counted), and how many outputs equal the plain ones.

    ratio: to the first drafter.
    """
    plain = {row["prompt"]: row["tokens"] for row in rows if row["drafter"] == PLAIN}
    summary: dict[str, dict[str, dict[str, Any]]] = {}
    for row in rows:
        if row["drafter"] == PLAIN:
            continue
        values = summary.setdefault(row["set"], {}).setdefault(
            row["drafter"], {"prompts": 0, "identical": 0, "tokens": 0, "forwards": 0}
        )
        values["prompts"] += 1
        values["identical"] += row["tokens"] == plain[row["prompt"]]
        values["tokens"] += sum(row["accepted"]) + len(row["accepted"])
        values["forwards"] += len(row["accepted"])
    for figures in summary.values():
        for values in figures.values():
            values["acceptance_length"] = values["tokens"] / max(1, values["forwards"])
        first = next(iter(figures.values()))["acceptance_length"]
        for values in figures.values():
            values["ratio"] = values["acceptance_length"] / first
    return summary


def _begin(options: argparse.Namespace) -> dict[str, Any]:
    """The record so far, or a new one."""
    settings = {
        "model": options.model,
        "target_adapter": options.target_adapter,
        "max_new_tokens": options.max_new_tokens,
        "dtype": options.dtype,
    }
    if not options.output.exists():
        return {"settings": settings, "drafters": options.drafters, "rows": []}
    record = json.loads(options.output.read_text(encoding="utf-8"))
    if record["settings"] != settings:
        raise ValueError(f"{options.output} was measured with {record['settings']}; give another --output.")
    changed = [label for label, path in options.drafters.items() if record["drafters"].setdefault(label, path) != path]
    if changed:
        raise ValueError(f"{options.output} has other drafters of the name {', '.join(changed)}; rename them.")
    return record


if __name__ == "__main__":
    try:
        main()
    except ValueError as error:
        sys.exit(f"acceptance.py: {error}")
