"""`DominoTrainer`: transformers' Trainer over packed blocks, with the base-anchored curriculum."""

from dataclasses import dataclass, field

import torch
from transformers import PreTrainedModel, Trainer, TrainingArguments

from hf_domino.drafter.modeling_domino import DominoDraftModel
from hf_domino.drafter.target_domino import Target

from .blocks import block_states, sample_anchors
from .data import ShardDataset, collate
from .objective import BlockLoss, Curriculum, OutputVocabulary, block_loss


@dataclass
class DominoTrainingArguments(TrainingArguments):
    """Trainer's arguments, and Domino's.

    The curriculum has two phases: the backbone alone (λ = 1), then a linear hand-over to the corrected distribution.
    """

    num_anchors: int = field(default=64, metadata={"help": "Blocks per sequence and step."})
    train_block_size: int | None = field(default=None, metadata={"help": "K in training; default: the drafter's."})
    decay_gamma: float = field(default=7.0, metadata={"help": "γ of the decay weights exp(-k / γ)."})
    base_share: float = field(default=0.2, metadata={"help": "Share of the steps with λ = 1."})
    handover_share: float = field(default=0.5, metadata={"help": "Share of the steps over which λ falls."})
    final_base_weight: float = field(default=0.0, metadata={"help": "λ at the end."})
    frequent_tokens: int | None = field(default=None, metadata={"help": "Sampled softmax: tokens always in it."})
    random_tokens: int = field(default=1024, metadata={"help": "Sampled softmax: further tokens drawn each step."})
    chunk_blocks: int = field(default=256, metadata={"help": "Blocks whose logits are alive at once."})
    remove_unused_columns: bool = False
    label_names: list[str] | None = field(default_factory=lambda: ["input_ids"])


class DominoTrainer(Trainer):
    """Trains a drafter for a frozen target.

    Args:
        model: the drafter (or a PEFT wrapper of it).
        target: the frozen target; run only where the data has no tapped states.
    """

    def __init__(self, model: DominoDraftModel, target: PreTrainedModel, args: DominoTrainingArguments,
                 train_dataset: ShardDataset, **kwargs):
        super().__init__(model=model, args=args, train_dataset=train_dataset, data_collator=collate, **kwargs)
        self.drafter = model
        self.target = target.eval().requires_grad_(False)
        self.view = Target(target, model.config)
        self.curriculum = Curriculum(args.base_share, args.handover_share, args.final_base_weight)
        self.frequent = None
        if args.frequent_tokens:
            counts = train_dataset.token_counts(model.config.vocab_size)
            self.frequent = counts.topk(min(args.frequent_tokens, counts.numel())).indices
        self.skipped_sequences = 0
        self._sums: BlockLoss | None = None

    @property
    def base_weight(self) -> float:
        """λ now: a function of the step alone, so a resumed run goes on where it was."""
        return self.curriculum.weight(self.state.global_step / max(1, self.state.max_steps))

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        lam = self.base_weight if model.training else self.curriculum.end
        sums = self.batch_loss(inputs, with_head=lam < 1.0)
        if sums is None:  # no anchor in the whole batch: a step that moves nothing
            return sum(p.sum() for p in model.parameters() if p.requires_grad) * 0.0
        loss = ((1 - lam) * sums.final + lam * sums.base) / sums.weight.clamp_min(1e-6)
        if lam == 1.0:  # DDP wants every parameter in the graph
            loss = loss + sum(p.sum() for p in model.parameters() if p.requires_grad) * 0.0
        detached = BlockLoss(*(value.detach().float() for value in vars(sums).values()))
        self._sums = detached if self._sums is None else self._sums + detached
        return (loss, {"loss": loss.detach()}) if return_outputs else loss

    def batch_loss(self, inputs: dict[str, torch.Tensor], with_head: bool) -> BlockLoss | None:
        """Loss sums of one batch, or `None` if it holds no anchor."""
        drafter, args = self.drafter, self.args
        config = drafter.config
        block_size = args.train_block_size or config.block_size
        drafts = block_size - config.row_offset
        ids_BS, mask_BS = inputs["input_ids"], inputs["loss_mask"]
        blocks = sample_anchors(mask_BS, args.num_anchors)
        if blocks is None:
            self.skipped_sequences += ids_BS.shape[0]
            return None
        self.skipped_sequences += int((~blocks.valid_BA.any(-1)).sum())
        dtype = drafter.fc.weight.dtype
        anchors = blocks.anchors_BA

        tapped = inputs.get("tapped_states")
        if tapped is None:
            with torch.no_grad():
                output = self.target(ids_BS, output_hidden_states=self.view.hidden_states_indices, use_cache=False)
            tapped = self.view.tapped_states(output.hidden_states)

        steps = torch.arange(drafts + 1, device=ids_BS.device)
        positions = (anchors[..., None] + steps)  # anchor, then the true drafts
        inside = positions < inputs["lengths"][:, None, None]
        positions = positions.clamp_max(ids_BS.shape[1] - 1)
        rows = torch.arange(ids_BS.shape[0], device=ids_BS.device)[:, None, None]
        tokens_BAJ1 = ids_BS[rows, positions]
        supervised = (mask_BS[rows, positions] & inside & blocks.valid_BA[..., None])[..., 1:].long().cumprod(-1)
        keep = blocks.valid_BA

        like = drafter.fc.weight
        prefix_embeds = self.view.embed(tokens_BAJ1[..., :-1], like)
        mask_embed = self.view.embed(torch.tensor(config.mask_token_id), like)
        states = block_states(drafter, tapped.to(dtype), prefix_embeds[:, :, 0], mask_embed, anchors, block_size)
        states = states[:, :, config.row_offset:]
        labels = tokens_BAJ1[..., 1:][keep]
        head_weight = self.view.output_head.weight
        if self.frequent is None:
            vocabulary = OutputVocabulary(head_weight)
        else:
            vocabulary, labels = OutputVocabulary.sampled(head_weight, labels, self.frequent, args.random_tokens)
        return block_loss(
            drafter, states[keep], prefix_embeds[keep], labels, supervised[keep], vocabulary,
            args.decay_gamma, with_head, args.chunk_blocks,
        )

    def log(self, logs: dict[str, float], *args, **kwargs) -> None:
        if self._sums is not None and "loss" in logs:
            sums, self._sums = self._sums, None
            weight, blocks = sums.weight.clamp_min(1e-6), sums.blocks.clamp_min(1)
            logs |= {
                "base_weight": round(self.base_weight, 4),
                "base_loss": round((sums.base / weight).item(), 4),
                "final_loss": round((sums.final / weight).item(), 4),
                # Teacher-forced on the training text: tokens per target forward, bonus included.
                "base_acceptance": round(1 + (sums.base_accepted / blocks).item(), 4),
                "final_acceptance": round(1 + (sums.final_accepted / blocks).item(), 4),
                "skipped_sequences": self.skipped_sequences,
            }
        super().log(logs, *args, **kwargs)
