"""`DominoTrainer`: transformers' Trainer over packed blocks, with the base-anchored curriculum."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel, Trainer
from transformers.trainer_pt_utils import LengthGroupedSampler

from hf_domino.drafter.modeling_domino import DominoDraftModel
from hf_domino.drafter.target_domino import Target, unwrap

from .acceptance import AcceptanceWatch, HeldOutPrompts, acceptance_length
from .arguments import DominoTrainingArguments
from .blocks import make_blocks, sample_anchors, sequence_generators
from .curriculum import Curriculum
from .data import ShardDataset, collate
from .objective import BlockLoss, Teacher, decay_weights, default_gamma, most_probable
from .packed_loss import PackedLoss

__all__ = ["DominoTrainer", "DominoTrainingArguments", "ShardDataset"]

RECORD = "training.json"


class DominoTrainer(Trainer):
    """Trains a drafter for a frozen target.

    Anchors, the sampled softmax and λ follow from (seed, step, sequence) alone, and the loss is normalised by the
    decay weights of the whole optimizer step: a resumed run goes on exactly where it was, and splitting a step over
    processes or accumulated batches does not change it.

    Args:
        model: the drafter (or a PEFT wrapper of it).
        target: the frozen target; run over the text only where the data has no tapped states.
        train_dataset: training text, as [`ShardDataset`] gives it.
        eval_dataset: held-out prompts; `evaluate` measures the accepted length on them.
        record: written beside every saved model, with the training arguments.
    """

    args: DominoTrainingArguments

    def __init__(
        self,
        model: DominoDraftModel,
        target: PreTrainedModel,
        args: DominoTrainingArguments,
        train_dataset: ShardDataset,
        eval_dataset: HeldOutPrompts | None = None,
        record: dict[str, Any] | None = None,
        **kwargs: Any,
    ):
        config = unwrap(model).config
        self.block_size = args.train_block_size or config.block_size
        if not 2 <= self.block_size <= config.block_size:
            raise ValueError(
                f"train_block_size must lie between 2 and the drafter's block_size ({config.block_size}), got "
                f"{self.block_size}."
            )
        if config.draft_vocab_size is not None and args.frequent_tokens:
            raise ValueError(
                f"This drafter has a draft vocabulary of {config.draft_vocab_size} tokens, over which the softmax is "
                "exact and cheap; a sampled one (frequent_tokens) is for drafters of the whole vocabulary. Unset it."
            )
        self.curriculum = Curriculum(args.base_share, args.handover_share, args.final_base_weight)
        self.num_drafts = self.block_size - config.row_offset
        self.gamma = args.decay_gamma or default_gamma(self.block_size)
        self.view = Target(target, config)
        super().__init__(
            model=model,
            args=args,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            data_collator=collate,
            **kwargs,
        )
        if self.is_fsdp_enabled:
            _check_sharding(self.accelerator.state.fsdp_plugin)
        # The loss comes normalised over the whole step: Trainer must not divide it again.
        self.model_accepts_loss_kwargs = True
        self.target = target.eval().requires_grad_(False)
        if getattr(target, "hf_device_map", None) is None:
            self.target.to(args.device)
        self.record = record or {}
        self.skipped_sequences = 0
        self._sums: BlockLoss | None = None
        frequent = None
        if args.frequent_tokens:
            counts = train_dataset.token_counts(config.vocab_size)
            frequent = counts.topk(min(args.frequent_tokens, counts.numel())).indices
        self.packed_loss = PackedLoss(
            model,
            self.view,
            self.block_size,
            self.gamma,
            frequent,
            args.random_tokens,
            args.chunk_blocks,
        )
        for layer in unwrap(model).layers:
            layer._can_checkpoint_with_cache = True  # a PackedContext is only read
        if eval_dataset is not None:
            self.add_callback(AcceptanceWatch())

    @property
    def base_weight(self) -> float:
        """λ now: a function of the step alone, so a resumed run goes on where it was."""
        return self.curriculum.weight(self.state.global_step / max(1, self.state.max_steps))

    @property
    def draftable(self) -> torch.Tensor | None:
        """True at the tokens of a restricted drafter, `[V]`; `None`: all."""
        drafter = unwrap(self.model)
        return None if drafter.config.draft_vocab_size is None else drafter.t2d

    def _get_train_sampler(self, train_dataset=None):
        dataset = self.train_dataset if train_dataset is None else train_dataset
        if self.args.train_sampling_strategy != "group_by_length" or not hasattr(dataset, "lengths"):
            return super()._get_train_sampler(train_dataset)
        # Trainer's own reads every sequence, stored states and all, to learn its length.
        batch = self.args.train_batch_size * self.args.gradient_accumulation_steps
        return LengthGroupedSampler(batch, lengths=dataset.lengths)

    def _prepare_for_training(self, *args, **kwargs):
        # The wrapper (DDP, FSDP, autocast) must enclose the whole loss; saving and loading see the drafter.
        drafter = self.model
        self.model = self.model_wrapped = self.packed_loss
        prepared = super()._prepare_for_training(*args, **kwargs)
        self.model = drafter
        return prepared

    @contextmanager
    def whole_drafter(self) -> Iterator[None]:
        """All of the drafter's weights in place: under FSDP each process holds a share of them between steps."""
        sharded = self.packed_loss if isinstance(self.packed_loss, FSDPModule) else None
        if sharded is not None:
            sharded.unshard()
        yield
        if sharded is not None:
            sharded.reshard()

    def _load_from_checkpoint(self, resume_from_checkpoint, model=None):
        # Saved is the drafter, so loaded into is the drafter, not the wrapper around the whole loss.
        super()._load_from_checkpoint(resume_from_checkpoint, self.packed_loss.model)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        self.model = self.packed_loss.model  # under FSDP the optimizer's state is saved under the model's names
        super()._load_optimizer_and_scheduler(checkpoint)

    def get_batch_samples(self, epoch_iterator, num_batches, device):
        """The batches of one optimizer step, with their blocks, and the sum of decay weights over all processes."""
        batches, _ = super().get_batch_samples(epoch_iterator, num_batches, device)
        weight = torch.zeros((), device=device)
        for batch in batches:
            batch["blocks"] = self.draw_blocks(batch)
            supervised = batch["blocks"]["supervised_BAJ"]
            self.skipped_sequences += int((~batch["blocks"]["real_BA"].any(-1)).sum())
            weight += (decay_weights(self.num_drafts, self.gamma, supervised.device) * supervised).sum().to(device)
        return batches, self.accelerator.reduce(weight, "sum") if batches else None

    def draw_blocks(self, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Blocks of a batch at the present step."""
        generators = sequence_generators(self.args.seed, self.state.global_step, batch["index"].tolist())
        anchors, real = sample_anchors(batch["loss_mask"], self.args.num_anchors, generators)
        ids, mask, lengths = batch["input_ids"], batch["loss_mask"], batch["lengths"]
        return vars(make_blocks(ids, mask, lengths, self.num_drafts, anchors, real, self.draftable))

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        tapped, teacher = self.target_says(inputs)
        indices = inputs["index"].tolist()
        names: list[Any] = [f"softmax {indices[0]}"]
        (generator,) = sequence_generators(self.args.seed, self.state.global_step, names)
        loss, sums = model(tapped, inputs["blocks"], self.base_weight, generator, teacher)
        self._sums = sums if self._sums is None else self._sums + sums
        # DDP averages over processes what is here a share of one sum.
        loss = loss * self.accelerator.num_processes / num_items_in_batch.clamp_min(1e-6)
        return (loss, {"loss": loss.detach()}) if return_outputs else loss

    @torch.no_grad()
    def target_says(self, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, Teacher | None]:
        """The target's tapped states `[B, S, M·H]` of a right-padded batch and, for the KL objective, its
        distributions: as stored, or by one forward of it where either is not."""
        tapped, teacher = batch.get("tapped_states"), None
        distils = self.args.objective == "kl"
        if distils and "teacher_ids" in batch:
            teacher = Teacher(batch["teacher_ids"].long(), batch["teacher_probs"])
        if tapped is None or (distils and teacher is None):
            output = self.target(
                batch["input_ids"].to(self.target.device),
                output_hidden_states=self.view.hidden_states_indices,
                use_cache=False,
                # Where only states are read, no row at all: the last rows of a batch alone (1) are multiplied by as
                # many copies of the head, a fifth of the forward's time.
                logits_to_keep=0 if distils else torch.empty(0, dtype=torch.long),
            )
            if tapped is None:
                tapped = self.view.tapped_states(output.hidden_states)
            if distils and teacher is None:
                teacher = most_probable(output.logits[..., : self.view.config.vocab_size], self.args.teacher_top_k)
        return tapped, teacher

    def evaluate(self, eval_dataset=None, ignore_keys=None, metric_key_prefix: str = "eval") -> dict[str, float]:
        """True accepted length on the held-out prompts: greedy `generate` with the drafter as it is now."""
        prompts: Any = self.eval_dataset if eval_dataset is None else eval_dataset
        if prompts is None:
            raise ValueError("evaluate needs held-out prompts; pass eval_dataset.")
        state = self.accelerator
        mine = range(state.process_index, len(prompts), state.num_processes)
        drafter = unwrap(self.model)
        with self.whole_drafter():
            found = acceptance_length(self.target, drafter, [prompts[i] for i in mine], self.args.eval_max_new_tokens)
        tokens, forwards = state.reduce(torch.tensor(found, dtype=torch.float32, device=self.args.device)).tolist()
        metrics = {f"{metric_key_prefix}_acceptance_length": round(tokens / max(1.0, forwards), 4)}
        self.log(metrics)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    def log(self, logs: dict[str, float], *args, **kwargs) -> None:
        if self._sums is not None and "loss" in logs:
            sums, self._sums = self._sums, None
            parts = torch.stack([*vars(sums).values(), torch.tensor(float(self.skipped_sequences)).to(sums.base)])
            *values, skipped = self.accelerator.reduce(parts, "sum").tolist()
            base, final, weight, base_accepted, final_accepted, blocks = values
            weight, blocks = max(weight, 1e-6), max(blocks, 1.0)
            logs |= {
                "base_weight": round(self.base_weight, 4),
                "base_loss": round(base / weight, 4),
                "final_loss": round(final / weight, 4),
                # Teacher-forced on the training text: tokens per target forward, bonus included. With a sampled
                # softmax, over its tokens only: a little too high.
                "base_acceptance": round(1 + base_accepted / blocks, 4),
                "final_acceptance": round(1 + final_accepted / blocks, 4),
                "skipped_sequences": int(skipped),
            }
        super().log(logs, *args, **kwargs)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """The drafter in the community's layout, and the record of how it was trained."""
        super().save_model(output_dir, _internal_call)
        if self.args.should_save:
            self.write_record(output_dir or self.args.output_dir)

    def write_record(self, folder: str | Path) -> None:
        """Every setting of this run, and how far it has come, as `training.json`."""
        record = {
            **self.record,
            "training_args": self.args.to_dict(),
            "block_size": self.block_size,
            "decay_gamma": self.gamma,
            "step": self.state.global_step,
            "max_steps": self.state.max_steps,
            "skipped_sequences": self.skipped_sequences,
            "log_history": self.state.log_history,
        }
        (Path(folder) / RECORD).write_text(json.dumps(record, indent=2, default=str) + "\n", encoding="utf-8")


def _check_sharding(plugin: Any) -> None:
    """Refuses FSDP of single layers: a layer's keys and values of the context are computed outside its forward."""
    if plugin.fsdp_version != 2 or plugin.transformer_cls_names_to_wrap or plugin.min_num_params:
        raise ValueError(
            "FSDP shares out the drafter as one unit, by its version 2: set fsdp_version 2 and "
            "fsdp_auto_wrap_policy NO_WRAP, and neither fsdp_transformer_layer_cls_to_wrap nor fsdp_min_num_params "
            "(scripts/configs/accelerate_fsdp.yaml)."
        )
