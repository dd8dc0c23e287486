"""``slurm/island.sbatch`` with Slurm replaced at the edge: what it would run, and what it refuses."""

import os
import stat
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[3] / "slurm" / "island.sbatch"
JOB = {
    "SLURM_JOB_ID": "40123",
    "SLURM_JOB_NODELIST": "n[7-8]",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURM_GPUS_ON_NODE": "4",
}


def run(
    tmp_path: Path, *arguments: str, hosts: str = "n7\\nn8", **environment: str
) -> subprocess.CompletedProcess[str]:
    for name, body in {"scontrol": f'printf "{hosts}"', "srun": 'echo "$SRUN_CPUS_PER_TASK|$*"'}.items():
        stub = tmp_path / name
        stub.write_text(f"#!/bin/bash\n{body}\n")
        stub.chmod(stub.stat().st_mode | stat.S_IXUSR)
    path = f"{tmp_path}:{os.environ['PATH']}"
    return subprocess.run(
        ["bash", str(SCRIPT), *arguments],
        env={"PATH": path, **JOB, **environment},
        capture_output=True,
        text=True,
    )


def test_it_starts_one_torchrun_a_node_on_the_first_node_of_the_job(tmp_path: Path) -> None:
    ran = run(
        tmp_path, "a b.toml", "3", "http://hub:29510", "--training.steps", "5", SLURM_CPUS_PER_TASK="12"
    )
    assert ran.returncode == 0, ran.stderr
    cpus, command = ran.stdout.strip().split("|")
    assert cpus == "12"
    assert command == (
        "--kill-on-bad-exit=1 torchrun --nnodes 2 --nproc-per-node 4 --rdzv-backend c10d --rdzv-id 40123 "
        "--rdzv-endpoint n7:20123 -m torchtitan_diloco.train --job.config_file a b.toml --island.id 3 "
        "--lighthouse.address http://hub:29510 --training.steps 5"
    )


def test_of_very_many_nodes_the_first_is_taken_and_scontrol_may_finish(tmp_path: Path) -> None:
    """A pipe that is cut short kills scontrol, and with pipefail the job, without a word."""
    ran = run(tmp_path, "file.toml", "0", "http://hub:29510", hosts="n7$(seq -f '\\nnode%g' 20000)")
    assert ran.returncode == 0, ran.returncode
    assert "--rdzv-endpoint n7:20123" in ran.stdout


@pytest.mark.parametrize("count", [0, 1, 2])
def test_a_missing_argument_is_named(tmp_path: Path, count: int) -> None:
    ran = run(tmp_path, *["file.toml", "0"][:count])
    assert ran.returncode != 0
    assert ["usage", "island id", "Lighthouse"][count] in ran.stderr


def test_without_a_host_name_it_stops_instead_of_using_localhost(tmp_path: Path) -> None:
    """FR-10."""
    ran = run(tmp_path, "file.toml", "0", "http://hub:29510", hosts="")
    assert ran.returncode == 2
    assert "scontrol names no node" in ran.stderr
    assert "localhost:" not in SCRIPT.read_text()
