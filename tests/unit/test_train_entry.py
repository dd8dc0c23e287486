"""The trainer's entry point where it cannot train: one sentence, nothing written."""

import os
import subprocess
import sys
from pathlib import Path

QUICKSTART = Path(__file__).parents[2] / "train_configs" / "quickstart.toml"


def test_without_torchrun_it_gives_the_command(tmp_path: Path) -> None:
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "LOCAL_RANK", "WORLD_SIZE")}
    arguments = ["--job.config_file", str(QUICKSTART), "--training.steps", "3"]
    done = subprocess.run(
        [sys.executable, "-m", "torchtitan_diloco.train", *arguments],
        cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: this process is no rank of a job (RANK, LOCAL_RANK, WORLD_SIZE")
    assert f"`torchrun --nproc_per_node 1 -m torchtitan_diloco.train {' '.join(arguments)}`" in line
    assert not list(tmp_path.iterdir())
