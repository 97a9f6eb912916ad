"""Trainer's arguments, and Domino's."""

from dataclasses import dataclass, field

from transformers import TrainingArguments

OBJECTIVES = ("cross_entropy", "kl")


@dataclass
class DominoTrainingArguments(TrainingArguments):
    """[`TrainingArguments`] and what is Domino's own.

    The curriculum has two phases: the backbone alone (λ = 1), then a linear hand-over to the corrected distribution.
    """

    num_anchors: int = field(default=64, metadata={"help": "Blocks per sequence and step."})
    train_block_size: int | None = field(
        default=None, metadata={"help": "K in training, at most the drafter's; default: the drafter's."}
    )
    decay_gamma: float | None = field(
        default=None, metadata={"help": "Gamma of the decay weights exp(-k / gamma); default: by block size."}
    )
    objective: str = field(
        default="cross_entropy",
        metadata={"help": "cross_entropy with the text, or kl: the divergence from the target's own distribution."},
    )
    teacher_top_k: int = field(
        default=32, metadata={"help": "kl without stored distributions: the target's tokens that it is taken over."}
    )
    base_share: float = field(default=0.2, metadata={"help": "Share of the steps with lambda = 1."})
    handover_share: float = field(default=0.5, metadata={"help": "Share of the steps over which lambda falls."})
    final_base_weight: float = field(default=0.0, metadata={"help": "Lambda at the end."})
    frequent_tokens: int | None = field(
        default=None, metadata={"help": "Sampled softmax: tokens always in it; default: the whole vocabulary."}
    )
    random_tokens: int = field(default=1024, metadata={"help": "Sampled softmax: further tokens drawn each step."})
    chunk_blocks: int = field(default=256, metadata={"help": "Blocks whose logits are alive at once."})
    eval_max_new_tokens: int = field(
        default=64, metadata={"help": "Tokens generated per held-out prompt when the accepted length is measured."}
    )
    remove_unused_columns: bool = field(default=False, metadata={"help": "Keep false: the loss reads them all."})
    # Every parameter is in the graph at every step (see PackedLoss), so DDP need not search.
    ddp_find_unused_parameters: bool | None = field(
        default=False, metadata={"help": "As TrainingArguments has it, but false: every parameter is always used."}
    )

    def __post_init__(self):
        super().__post_init__()
        if self.objective not in OBJECTIVES:
            raise ValueError(f"objective is one of {', '.join(OBJECTIVES)}, got {self.objective!r}.")
