"""TorchTitan's own entry point trains our configurations, with its own flags on top."""

import json
import subprocess
import sys

import pytest


def torchtitan_train(folder, *flags: str) -> subprocess.CompletedProcess:
    words = ["-m", "torch.distributed.run", "--nproc_per_node", "1", "--standalone", "-m", "torchtitan.train"]
    return subprocess.run(
        [sys.executable, "-W", "ignore", *words, "--module", "torchtitan_diloco", *flags],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=150,
    )


@pytest.mark.timeout(200)
def test_torchtitans_entry_point_trains_the_quickstart_with_its_own_flags(tmp_path):
    flags = {
        "--config": "quickstart",
        "--training.steps": "6",
        "--training.local_batch_size": "1",
        "--lr_scheduler.warmup_steps": "2",
        "--metrics.log_freq": "1",
        "--semi_sync.sync_every": "3",
        "--semi_sync.num_islands": "1",
        "--transport.kind": "memory",
    }
    done = torchtitan_train(tmp_path, *[word for flag in flags.items() for word in flag])
    assert done.returncode == 0, done.stderr[-3000:]
    folder = tmp_path / "outputs" / "quickstart" / "island-0"
    assert json.loads((folder / "state.json").read_text())["state"] == "done"
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    assert {event["island"] for event in events} == {0}
    assert [e["step"] for e in events if e["event"] == "inner"] == [1, 2, 3, 4, 5, 6]
    assert [(e["step"], e["committed"]) for e in events if e["event"] == "round"] == [(3, True), (6, True)]
