"""Training under torchrun, for tests: the jobs of a JSON file, one after the other, half of each batch per process."""

import json
import sys
from pathlib import Path

import torch
from accelerate import DistributedType, PartialState
from accelerate.state import AcceleratorState

from hf_domino import DominoDraftModel
from hf_domino.training.acceptance import HeldOutPrompts
from hf_domino.training.data import ShardDataset
from hf_domino.training.trainer import DominoTrainer
from tests.tiny import prompt_ids, tiny_target
from tests.training.conftest import training_arguments


def pretend_to_have_accelerators() -> None:
    """accelerate shards over accelerators only; CPUs it leaves to DDP without a word, though torch shards there too."""
    AcceleratorState._reset_state()
    PartialState()._shared_state["distributed_type"] = DistributedType.MULTI_GPU


def run(data: str, start: str, output: str, resume: str | None = None, **settings) -> None:
    drafter = DominoDraftModel.from_pretrained(start, dtype=torch.float32)
    arguments = training_arguments(output, **(dict(per_device_train_batch_size=2, ddp_backend="gloo") | settings))
    assert arguments.world_size == 2
    if arguments.fsdp:
        pretend_to_have_accelerators()
    prompts = HeldOutPrompts(prompt_ids(3, 77, batch=3).tolist())
    trainer = DominoTrainer(drafter, tiny_target(context=0.3), arguments, ShardDataset(data), prompts)
    assert trainer.is_fsdp_enabled == bool(arguments.fsdp)
    trainer.train(resume_from_checkpoint=resume)
    if arguments.fsdp:
        held = sum(p.to_local().numel() for p in drafter.parameters())
        assert held < 0.6 * sum(p.numel() for p in drafter.parameters()), "each process holds its half"
        trainer.evaluate()
    trainer.save_model()


if __name__ == "__main__":
    for job in json.loads(Path(sys.argv[1]).read_text()):
        run(**job)
