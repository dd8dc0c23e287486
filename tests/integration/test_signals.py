"""Told to stop at any moment, an island ends with a checkpoint that it can go on from."""

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

REPO = Path(__file__).parents[2]
SEED = int(os.environ.get("DILOCO_SEED", str(random.SystemRandom().randrange(2**31))))


@pytest.mark.parametrize("count", [4, pytest.param(50, marks=[pytest.mark.slow, pytest.mark.timeout(900)])])
def test_fr_18_a_signal_at_any_moment_leaves_a_checkpoint_to_go_on_from(
    count: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Half of them get it twice, 10 ms apart."""
    with capsys.disabled():
        print(f"\n{count} islands from DILOCO_SEED={SEED}")
    words = [sys.executable, "-W", "ignore", "-m", "tests.helpers.signalled", str(count), str(SEED)]
    done = subprocess.run(
        [*words, str(tmp_path / "islands")],
        cwd=REPO,
        capture_output=True,
        text=True,
        timeout=850,
        check=False,
    )
    stopped = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(stopped) == count, done.stderr[-3000:]
    for island in stopped:
        assert island["codes"] == [0, 0] and island["state"] == "resume", island
        assert island["saved"] is not None and island["saved"] == island["drained_at"] > 0, island
        assert island["steps"] == [island["saved"] + 1, island["saved"] + 2], island
