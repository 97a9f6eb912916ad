"""One training run, from its settings to a saved drafter."""

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
import yaml
from transformers import PreTrainedModel
from transformers.trainer_utils import get_last_checkpoint

from hf_domino.drafter.configuration_domino import DominoConfig
from hf_domino.drafter.modeling_domino import DominoDraftModel
from hf_domino.drafter.target_domino import check_pair, fingerprint

from .acceptance import HeldOutPrompts
from .arguments import DominoTrainingArguments
from .data import ShardDataset, chat_tokens
from .exclusion import file_digest
from .lora import LoraArguments, add_adapter, describe, save_adapter, train_only
from .prompts import read_prompts
from .trainer import DominoTrainer
from .vocabulary import restrict_to_frequent
from .warm_start import start_from_target

FINAL = "final"


@dataclass
class RunArguments:
    """What `scripts/train.py` takes besides the trainer's arguments."""

    data: str = field(metadata={"help": "Folder of shards, made by scripts/prepare_data.py."})
    target: str | None = field(
        default=None, metadata={"help": "Path or Hub id of the target; default: the embedded SmolLM2-135M-Instruct."}
    )
    target_dtype: str = field(default="bfloat16", metadata={"help": "The target's dtype."})
    target_adapter: str | None = field(
        default=None,
        metadata={"help": "PEFT adapter of the target, folder or Hub id, that is active while the drafter learns."},
    )
    target_quantization: str | None = field(
        default=None, metadata={"help": "Load the target in 4bit or 8bit (bitsandbytes, on a GPU)."}
    )
    init_from: str | None = field(
        default=None, metadata={"help": "Drafter to go on from: a folder or a Hub id. Its shape is kept."}
    )
    warm_start: bool = field(
        default=True, metadata={"help": "A new drafter starts from the target's last layers rather than at random."}
    )
    drafter: list[str] = field(
        default_factory=list,
        metadata={"help": "Fields of a new drafter's DominoConfig, as name=value (in YAML: a mapping)."},
    )
    train_only: list[str] = field(
        default_factory=list,
        metadata={"help": "Train these parts of the drafter alone, e.g. prefix_gru embed_proj; default: all of it."},
    )
    max_length: int | None = field(default=None, metadata={"help": "Longer sequences are cut at the end."})
    held_out: str | None = field(
        default=None, metadata={"help": "JSONL of prompts that training never sees: accepted length is measured there."}
    )
    held_out_limit: int = field(default=16, metadata={"help": "Use that many of them, spread over the file."})
    save_dtype: str = field(default="bfloat16", metadata={"help": "Of the final drafter's weights."})
    max_shard_size: str = field(default="5GB", metadata={"help": "Of the final drafter's weight files."})
    draft_vocab_size: int | None = field(
        default=None,
        metadata={"help": "Restrict the final drafter to the training text's most frequent tokens; default: all."},
    )
    resume: bool = field(default=True, metadata={"help": "Go on from output_dir's last checkpoint if there is one."})

    @property
    def drafter_fields(self) -> dict[str, Any]:
        """`drafter`, parsed.

        Raises:
            ValueError: an entry without `=`.
        """
        fields = {}
        for entry in self.drafter:
            name, found, value = entry.partition("=")
            if not found:
                raise ValueError(f"drafter takes name=value, got {entry!r}.")
            fields[name] = yaml.safe_load(value)
        return fields


def train(
    run: RunArguments,
    args: DominoTrainingArguments,
    target: PreTrainedModel,
    tokenizer: Any = None,
    lora: LoraArguments | None = None,
) -> DominoTrainer:
    """Trains, and saves the drafter in `output_dir/final`, in the community's layout; or its adapter, in PEFT's.

    Args:
        target: with its own adapter active, if it has one.
        tokenizer: the target's; needed for held-out prompts only.
        lora: what to adapt, if its `lora` is true.

    Raises:
        ValueError: target, drafter, data and settings do not fit one another.
    """
    adapts = lora is not None and lora.lora
    if adapts:
        _check_adapting(run)
    dataset = ShardDataset(run.data, run.max_length)
    checkpoint = get_last_checkpoint(args.output_dir) if run.resume and Path(args.output_dir).is_dir() else None
    torch.manual_seed(args.seed)
    drafter = make_drafter(run, target, dataset, warm=checkpoint is None)
    _check_data(dataset, drafter.config, target)
    if run.train_only:
        train_only(drafter, run.train_only)
    model: Any = add_adapter(drafter, lora) if adapts else drafter
    record = {
        "run": asdict(run),
        "drafter_config": drafter.config.to_dict(),
        "pair": _pair(run, target, drafter.config),
        "data": dataset.provenance,
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
    }
    if adapts:
        record["lora"] = asdict(lora) | describe(model)
    held_out = None
    if run.held_out:
        held_out = held_out_prompts(run, tokenizer)
        record["held_out"] = file_digest(run.held_out) | {"prompts": len(held_out)}
    trainer = DominoTrainer(model, target, args, dataset, held_out, record)
    trainer.train(resume_from_checkpoint=checkpoint)
    if args.should_save and adapts:
        folder = Path(args.output_dir) / FINAL
        save_adapter(model, folder, getattr(torch, run.save_dtype))
        trainer.write_record(folder)
    elif args.should_save:
        export(run, drafter, dataset, trainer)
    trainer.accelerator.wait_for_everyone()
    return trainer


def export(run: RunArguments, drafter: DominoDraftModel, dataset: ShardDataset, trainer: DominoTrainer) -> None:
    """The finished drafter, as users load it."""
    folder = Path(trainer.args.output_dir) / FINAL
    dtype = getattr(torch, run.save_dtype)
    finished = DominoDraftModel(DominoConfig.from_dict(drafter.config.to_dict()))
    finished.load_state_dict(drafter.state_dict())
    if run.draft_vocab_size is not None:
        restrict_to_frequent(finished, dataset, run.draft_vocab_size)
    finished.to(dtype).save_pretrained(folder, max_shard_size=run.max_shard_size)
    trainer.write_record(folder)


def _pair(run: RunArguments, target: PreTrainedModel, config: DominoConfig) -> dict[str, str | None]:
    """Who was trained for whom. A target named by its adapter alone is a PEFT wrapper of its base."""
    named_by_adapter = run.target if hasattr(target, "active_peft_config") else None
    return {
        "drafter": run.init_from,
        "target": config.target_name,
        "target_adapter": run.target_adapter or named_by_adapter,
    }


def _check_adapting(run: RunArguments) -> None:
    wrong = {
        "train_only": run.train_only,
        "drafter": run.drafter,
        "draft_vocab_size": run.draft_vocab_size,
    }
    if run.init_from is None:
        raise ValueError("--lora adapts a drafter that is trained already: give it as init_from (folder or Hub id).")
    for name, value in wrong.items():
        if value:
            raise ValueError(f"--lora leaves the drafter itself as it is: unset {name}.")


def make_drafter(run: RunArguments, target: PreTrainedModel, dataset: ShardDataset, warm: bool) -> DominoDraftModel:
    """A drafter in float32: the optimizer's steps are lost in bfloat16 weights."""
    if run.init_from is not None:
        if run.drafter:
            raise ValueError("A drafter that training goes on from keeps its shape: give init_from or drafter fields.")
        drafter = DominoDraftModel.from_pretrained(run.init_from, dtype=torch.float32)
        check_pair(target, drafter.config)
    else:
        fields = run.drafter_fields
        draft_vocab_size = fields.pop("draft_vocab_size", None)
        if "target_layer_ids" not in fields and dataset.has_states:
            stored = dataset.provenance.get("settings", {}).get("target_layer_ids")
            fields |= {"target_layer_ids": stored} if stored else {}
        drafter = DominoDraftModel(DominoConfig.for_target(target.config, **fields))
        if draft_vocab_size is not None:
            restrict_to_frequent(drafter, dataset, draft_vocab_size)
        if run.warm_start and warm:  # a checkpoint to resume from brings its own weights
            start_from_target(drafter, target, dataset[0]["input_ids"][None])
    if run.draft_vocab_size is not None and drafter.config.draft_vocab_size is not None:
        raise ValueError(
            f"This drafter has a draft vocabulary of {drafter.config.draft_vocab_size} tokens from the start, so the "
            "finished one has too: unset draft_vocab_size."
        )
    config = drafter.config
    config.target_name = getattr(target.config, "_name_or_path", None) or config.target_name
    config.target_fingerprint = fingerprint(target.get_input_embeddings().weight)
    return drafter


def _check_data(dataset: ShardDataset, config: DominoConfig, target: PreTrainedModel) -> None:
    settings = dataset.provenance.get("settings", {})
    stored = settings.get("target_fingerprint")
    if stored is not None and stored != fingerprint(target.get_input_embeddings().weight):
        raise ValueError(
            f"The data in {dataset.folder} is the text of another target ({settings.get('target')}): a drafter learns "
            "to imitate the target it is trained for. Make data with this one (scripts/prepare_data.py)."
        )
    if dataset.has_states:
        width = dataset[0]["tapped_states"].shape[-1]
        wanted = len(config.target_layer_ids) * config.hidden_size
        layers = settings.get("target_layer_ids", config.target_layer_ids)
        if width != wanted or layers != config.target_layer_ids:
            raise ValueError(
                f"The tapped states in {dataset.folder} are {width} wide, of layers {layers}; the drafter taps "
                f"{config.target_layer_ids}, {wanted} wide. Set target_layer_ids to match, or make new data."
            )


def held_out_prompts(run: RunArguments, tokenizer: Any) -> HeldOutPrompts:
    prompts = [prompt.turns[0] for prompt in read_prompts([str(run.held_out)])]
    step = max(1, len(prompts) // run.held_out_limit)
    return HeldOutPrompts([chat_tokens(tokenizer, text)[0] for text in prompts[::step][: run.held_out_limit]])
