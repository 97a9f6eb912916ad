"""What `test_two_processes_are_one` runs under torchrun: the same run, half of each batch per process."""

import sys

from hf_domino.training.data import ShardDataset
from hf_domino.training.trainer import DominoTrainer
from tests.tiny import tiny_target
from tests.training.conftest import small_drafter, training_arguments

if __name__ == "__main__":
    data, output = sys.argv[1:]
    target = tiny_target(context=0.3)
    arguments = training_arguments(output, per_device_train_batch_size=2, ddp_backend="gloo")
    assert arguments.world_size == 2
    trainer = DominoTrainer(small_drafter(target), target, arguments, ShardDataset(data))
    trainer.train()
    trainer.save_model()
