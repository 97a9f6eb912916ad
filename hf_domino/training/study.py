"""Training studies: drafters trained in different ways on the same batches, measured alike.

A study is a list of variants: settings changed against common ones. Its record tells, per variant, losses and
teacher-forced acceptance on a shard that was not trained on, true accepted length on held-out prompts, and the time.
"""

import copy
import json
import time
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from hf_domino.drafter.modeling_domino import DominoDraftModel
from hf_domino.record import write_record

from .acceptance import acceptance_length
from .arguments import DominoTrainingArguments
from .blocks import make_blocks, sample_anchors, sequence_generators
from .data import ShardDataset, collate
from .exclusion import file_digest
from .objective import BlockLoss
from .packed_loss import PackedLoss
from .run import RunArguments, held_out_prompts, make_drafter
from .trainer import DominoTrainer

_TRIAL_STEPS = 5


@dataclass(frozen=True)
class Variant:
    """trainer, drafter: the trainer's arguments and the new drafter's fields that it changes. warm: the drafter starts
    from the target's layers. equal_time: as many steps as the study's first variant has time for."""

    trainer: dict[str, Any] = field(default_factory=dict)
    drafter: dict[str, Any] = field(default_factory=dict)
    warm: bool = True
    equal_time: bool = False


_BASE_ONLY = {"base_share": 1.0, "handover_share": 0.0}
_NO_PHASES = {"base_share": 0.0, "handover_share": 0.0}

STUDIES: dict[str, dict[str, Variant]] = {
    "curriculum": {
        "anchored": Variant(),
        "final only": Variant(_NO_PHASES | {"final_base_weight": 0.0}),
        "base only": Variant(_BASE_ONLY),
        "fixed mix": Variant(_NO_PHASES | {"final_base_weight": 0.5}),
        "twin without head": Variant(_BASE_ONLY, {"head_type": "none"}, equal_time=True),
    },
    "start": {"warm": Variant(), "cold": Variant(warm=False)},
    "objective": {"cross-entropy": Variant(), "kl": Variant({"objective": "kl"})},
}


@dataclass
class StudyArguments:
    """What `scripts/training_study.py` takes besides the settings of a run."""

    study: str = field(metadata={"help": f"One of {', '.join(STUDIES)}."})
    record: str = field(metadata={"help": "The JSON record to write; variants that it holds already are kept."})
    variants: list[str] = field(default_factory=list, metadata={"help": "These of the study only; default: all."})
    train_shards: int | None = field(
        default=None, metadata={"help": "Train on the first shards; default: all but the last, which is measured on."}
    )
    measured_sequences: int = field(default=48, metadata={"help": "Sequences of the last shard that are measured."})

    def __post_init__(self):
        if self.study not in STUDIES:
            raise ValueError(f"There is no study {self.study!r}; there are {', '.join(STUDIES)}.")
        unknown = [name for name in self.variants if name not in STUDIES[self.study]]
        if unknown:
            raise ValueError(f"The study {self.study!r} has no variant {', '.join(unknown)}.")

    @property
    def chosen(self) -> dict[str, Variant]:
        return {name: variant for name, variant in STUDIES[self.study].items() if name in (self.variants or [name])}


def run_study(
    study: StudyArguments,
    run: RunArguments,
    args: DominoTrainingArguments,
    target: PreTrainedModel,
    tokenizer: Any = None,
) -> dict[str, Any]:
    """Trains and measures the variants, and writes the record after each: run again, it goes on.

    Each drafter is left in a folder of its own in `output_dir`, so that `scripts/studies.py` can compare them.

    Args:
        run, args: of all variants, but for what each changes; `max_steps` is the budget.
        tokenizer: the target's; needed for held-out prompts only.

    Raises:
        ValueError: the data has a single shard, or the record holds another study.
    """
    training = ShardDataset(run.data, run.max_length, slice(study.train_shards))
    measured = ShardDataset(run.data, run.max_length, slice(-1, None))
    if set(training.files) & set(measured.files):
        training = ShardDataset(run.data, run.max_length, slice(-1))
    prompts = list(held_out_prompts(run, tokenizer)) if run.held_out else []
    record = _record(study, run, args, training, measured)
    for name, variant in study.chosen.items():
        if name in record["variants"]:
            continue
        steps = args.max_steps
        if variant.equal_time and record["variants"]:
            first = next(iter(record["variants"].values()))
            _, seconds = _trained(run, args, variant, target, training, _TRIAL_STEPS)
            steps = max(1, round(first["seconds"] / (seconds / _TRIAL_STEPS)))
        trainer, seconds = _trained(run, args, variant, target, training, steps)
        trainer.save_model(str(Path(args.output_dir or ".", name.replace(" ", "_"))))
        result = {"changes": asdict(variant), "steps": steps, "seconds": round(seconds, 1)}
        result |= teacher_forced(trainer, measured, study.measured_sequences)
        if prompts:
            tokens, forwards = acceptance_length(target, trainer.model, prompts, args.eval_max_new_tokens)
            result["accepted_length"] = round(tokens / max(1, forwards), 4)
        record["variants"][name] = result
        write_record(study.record, record)
    return record


@torch.no_grad()
def teacher_forced(
    trainer: DominoTrainer, dataset: ShardDataset, sequences: int, anchors: int = 24, batch_size: int = 4
) -> dict[str, float]:
    """Cross-entropies and acceptance over blocks at fixed anchors: the same for every drafter of one block size.

    Args:
        sequences: use that many, spread over the dataset.
    """
    packed = PackedLoss(trainer.model, trainer.view, trainer.block_size, trainer.gamma, chunk_blocks=64)
    total: BlockLoss | None = None
    spread = range(0, len(dataset), max(1, len(dataset) // sequences))[:sequences]
    for first in range(0, len(spread), batch_size):
        batch = collate([dataset[i] for i in spread[first : first + batch_size]])
        batch = {key: value.to(trainer.args.device) for key, value in batch.items() if not key.startswith("teacher")}
        generators = sequence_generators(0, 0, batch["index"].tolist())
        drawn = sample_anchors(batch["loss_mask"], anchors, generators)
        ids, mask, lengths = batch["input_ids"], batch["loss_mask"], batch["lengths"]
        blocks = make_blocks(ids, mask, lengths, trainer.num_drafts, *drawn, trainer.draftable)
        _, sums = packed(trainer.target_says(batch)[0], vars(blocks), 0.5)
        total = sums if total is None else total + sums
    assert total is not None, "there is at least one sequence"
    weight, count = total.weight.clamp_min(1e-6), total.blocks.clamp_min(1)
    return {
        "base_loss": round((total.base / weight).item(), 4),
        "final_loss": round((total.final / weight).item(), 4),
        "base_acceptance": round(1 + (total.base_accepted / count).item(), 4),
        "final_acceptance": round(1 + (total.final_accepted / count).item(), 4),
    }


def _trained(
    run: RunArguments,
    args: DominoTrainingArguments,
    variant: Variant,
    target: PreTrainedModel,
    training: ShardDataset,
    steps: int,
) -> tuple[DominoTrainer, float]:
    """A trainer that is done, and its seconds: on CPUs those of this process alone, so that other work on the machine
    counts for nothing."""
    if run.init_from and (variant.drafter or not variant.warm):
        raise ValueError("The drafters of this study differ in shape or start, so they cannot go on from init_from.")
    args = copy.copy(args)
    for name, value in ({"max_steps": steps, "save_strategy": "no", "eval_strategy": "no"} | variant.trainer).items():
        setattr(args, name, value)
    added = [f"{name}={value}" for name, value in variant.drafter.items()]
    torch.manual_seed(args.seed)
    changed = replace(run, drafter=run.drafter + added, warm_start=run.warm_start and variant.warm)
    drafter: DominoDraftModel = make_drafter(changed, target, training, warm=True)
    trainer = DominoTrainer(drafter, target, args, training)
    clock = time.process_time if args.device.type == "cpu" else time.perf_counter
    start = clock()
    trainer.train()
    return trainer, clock() - start


def _record(
    study: StudyArguments,
    run: RunArguments,
    args: DominoTrainingArguments,
    training: ShardDataset,
    measured: ShardDataset,
) -> dict[str, Any]:
    """The record so far, or a new one.

    Raises:
        ValueError: it holds a study with other settings.
    """
    settings = {f.name: getattr(args, f.name) for f in fields(DominoTrainingArguments) if f.name in _TOLD}
    if run.held_out:
        settings["held_out"] = file_digest(run.held_out) | {"prompts": run.held_out_limit}
    record = {
        "study": study.study,
        "settings": settings | {"drafter": run.drafter, "goes_on": run.init_from is not None},
        "data": {
            "train_sequences": len(training),
            "train_tokens": sum(training.lengths),
            "measured_sequences": min(study.measured_sequences, len(measured)),
        },
        "device": args.device.type,
        "threads": torch.get_num_threads(),
        "variants": {},
    }
    record = json.loads(json.dumps(record))
    path = Path(study.record)
    if not path.exists():
        return record
    found = json.loads(path.read_text(encoding="utf-8"))
    if found | {"variants": {}} != record:
        raise ValueError(f"{path} holds a study with other settings; name another record, or remove it.")
    return found


_TOLD = (
    "max_steps",
    "learning_rate",
    "lr_scheduler_type",
    "warmup_steps",
    "per_device_train_batch_size",
    "num_anchors",
    "train_block_size",
    "decay_gamma",
    "base_share",
    "handover_share",
    "final_base_weight",
    "frequent_tokens",
    "random_tokens",
    "eval_max_new_tokens",
    "seed",
)


def table(record: dict[str, Any]) -> str:
    """The record's variants as a Markdown table."""
    columns = {
        "base_loss": "base loss",
        "final_loss": "final loss",
        "base_acceptance": "acceptance, base",
        "final_acceptance": "acceptance, final",
        "accepted_length": "accepted length",
        "steps": "steps",
        "seconds": "seconds",
    }
    found = record["variants"]
    shown = {key: title for key, title in columns.items() if all(key in result for result in found.values())}
    rows = ["| " + " | ".join(["variant", *shown.values()]) + " |", "|" + " --- |" * (1 + len(shown))]
    for name, result in found.items():
        cells = [f"{result[key]:.3f}" if key not in ("steps", "seconds") else f"{result[key]:.0f}" for key in shown]
        rows.append("| " + " | ".join([name, *cells]) + " |")
    return "\n".join(rows)
