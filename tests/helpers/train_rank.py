"""One rank of a training run with TorchTitan's own trainer; writes the logged losses as JSON.

Run as: python -m tests.helpers.train_rank RANK WORLD_SIZE PORT RESULT_FILE OPTIONS_JSON
"""

import json
import os
import sys
from pathlib import Path

import torch

from tests.helpers import tiny


def main() -> None:
    """Train as the command line says; OPTIONS_JSON goes to ``tiny_trainer_config``."""
    rank, world_size, port = (int(word) for word in sys.argv[1:4])
    os.environ.update(tiny.rank_environment(rank, world_size, port))
    trainer = tiny.build_trainer(tiny.tiny_trainer_config(**json.loads(sys.argv[5])))
    losses = tiny.record_losses(trainer)
    trainer.train()
    trainer.close()
    torch.distributed.destroy_process_group()
    Path(sys.argv[4]).write_text(json.dumps(losses))


if __name__ == "__main__":
    main()
