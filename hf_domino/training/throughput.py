"""Training throughput: supervised drafts a second, peak memory and where the time goes, over blocks and vocabulary.

    python -m hf_domino.training.throughput --record docs/records/training_throughput.json

One optimizer step of a new drafter for the target on made-up text and tapped states; the target itself does not run, as
with stored states. Its record is what `table` renders into docs/training.md.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import product
from statistics import median
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile
from transformers import PreTrainedModel

from hf_domino.drafter.configuration_domino import DominoConfig
from hf_domino.drafter.modeling_domino import DominoDraftModel
from hf_domino.drafter.target_domino import Target
from hf_domino.record import machine, record_at, write_record

from .blocks import make_blocks, sample_anchors
from .memory import Peak
from .objective import default_gamma
from .packed_loss import PackedLoss
from .settings import parse_settings
from .targets import load_target

_KINDS = {
    "matrix products": ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "mkldnn", "aten::linear", "gemm"),
    "attention": ("attention", "flash", "efficient"),
    "softmax and loss": ("softmax", "nll_loss", "cross_entropy", "logsumexp", "argmax"),
    "recurrence": ("gru", "rnn"),
    "gathering and copying": ("index", "copy_", "cat", "gather", "embedding", "clone", "fill_", "zero_"),
}


@dataclass
class ThroughputArguments:
    """What `python -m hf_domino.training.throughput` takes."""

    record: str = field(metadata={"help": "The JSON record to write."})
    target: str | None = field(default=None, metadata={"help": "Path or Hub id; default: the embedded one."})
    target_dtype: str = field(default="float32", metadata={"help": "The target's dtype."})
    sequences: int = field(default=4, metadata={"help": "Sequences a step."})
    length: int = field(default=256, metadata={"help": "Tokens of each."})
    anchors: list[int] = field(default_factory=lambda: [8, 32, 96], metadata={"help": "Blocks of each sequence."})
    vocabulary: list[int] = field(
        default_factory=lambda: [4096, 16384, 0], metadata={"help": "Sizes of the draft vocabulary; 0: all tokens."}
    )
    block_size: int = field(default=8, metadata={"help": "K."})
    layers: int = field(default=3, metadata={"help": "Of the drafter."})
    head_rank: int = field(default=128, metadata={"help": "R."})
    head_hidden_size: int = field(default=256, metadata={"help": "G."})
    steps: int = field(default=3, metadata={"help": "Steps timed for each entry, after one that is not."})
    device: str = field(default="cpu", metadata={"help": "cpu or cuda."})


def measure(arguments: ThroughputArguments, target: PreTrainedModel) -> dict[str, Any]:
    """The record: an entry for each number of blocks and vocabulary size, written as they come. It is gone on with."""
    settings = {key: value for key, value in vars(arguments).items() if key not in ("record", "target")}
    record = record_at(arguments.record, {"machine": machine(target.device), "settings": settings}, "entries")
    cells = list(product(arguments.vocabulary, arguments.anchors))
    for vocabulary, anchors in cells[len(record["entries"]) :]:
        record["entries"].append(_entry(arguments, target, anchors, vocabulary or None))
        write_record(arguments.record, record)
    return record


def _entry(
    arguments: ThroughputArguments, target: PreTrainedModel, anchors: int, vocabulary: int | None
) -> dict[str, Any]:
    torch.manual_seed(0)
    config = DominoConfig.for_target(
        target.config,
        block_size=arguments.block_size,
        num_hidden_layers=arguments.layers,
        head_rank=arguments.head_rank,
        head_hidden_size=arguments.head_hidden_size,
    )
    drafter = DominoDraftModel(config)
    if vocabulary is not None:
        drafter.restrict_vocabulary(torch.arange(vocabulary))
    drafter.to(target.device)
    loss = PackedLoss(drafter, Target(target, config), config.block_size, default_gamma(config.block_size))
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=1e-6, fused=True)  # as Trainer has it
    batch, length = arguments.sequences, arguments.length
    ids = torch.randint(0, vocabulary or config.vocab_size, (batch, length), device=target.device)
    mask = torch.ones_like(ids, dtype=torch.bool)
    lengths = torch.full((batch,), length, device=target.device)
    blocks = vars(make_blocks(ids, mask, lengths, config.max_drafts, *sample_anchors(mask, anchors)))
    tapped = torch.randn(batch, length, loss.drafter.fc.in_features, device=target.device)
    supervised = int(blocks["supervised_BAJ"].sum())

    def step() -> None:
        optimizer.zero_grad()
        value, sums = loss(tapped, blocks, 0.5)
        (value / sums.weight).backward()
        optimizer.step()
        if target.device.type == "cuda":
            torch.cuda.synchronize()

    step()
    seconds = []
    with Peak(target.device) as peak:
        for _ in range(arguments.steps):
            start = time.perf_counter()
            step()
            seconds.append(time.perf_counter() - start)
    return {
        "blocks": batch * anchors,
        "vocabulary": vocabulary or config.vocab_size,
        "supervised_drafts": supervised,
        "seconds": [round(value, 4) for value in seconds],
        "drafts_per_second": round(supervised / median(seconds), 1),
        "peak_memory_mb": peak.megabytes,
        "shares": _shares(step, target.device),
    }


def _shares(step: Any, device: torch.device) -> dict[str, float]:
    """Where one step's time goes, by the kind of operation (torch.profiler, self time)."""
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if device.type == "cuda" else [])
    with profile(activities=activities) as profiler:
        step()
    times: dict[str, float] = {}
    for event in profiler.key_averages():
        name = event.key.lower()
        spent = event.self_device_time_total if device.type == "cuda" else event.self_cpu_time_total
        kind = next((kind for kind, marks in _KINDS.items() if any(mark in name for mark in marks)), None)
        if kind is None:
            kind = "optimizer" if "adam" in name or "optimizer" in name else "rest"
        times[kind] = times.get(kind, 0.0) + spent
    total = sum(times.values()) or 1.0
    return {kind: round(spent / total, 3) for kind, spent in sorted(times.items(), key=lambda item: -item[1])}


def table(record: dict[str, Any]) -> str:
    """The record's entries as a Markdown table."""
    rows = ["| blocks | vocabulary | supervised drafts/s | peak memory, MB | where the time goes |", "|" + " --- |" * 5]
    for entry in record["entries"]:
        shares = ", ".join(f"{kind} {share:.0%}" for kind, share in list(entry["shares"].items())[:3])
        memory = "" if entry["peak_memory_mb"] is None else f"{entry['peak_memory_mb']:,}"
        cells = [entry["blocks"], f"{entry['vocabulary']:,}", f"{entry['drafts_per_second']:,.0f}", memory, shares]
        rows.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(rows)


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    (arguments,) = parse_settings([ThroughputArguments], argv)
    target, _ = load_target(arguments.target, arguments.target_dtype)
    target.to(arguments.device)
    record = measure(arguments, target)
    print(table(record))
    return record


if __name__ == "__main__":
    main()
