"""FR-55: what the outer loop needs of memory at its worst moments, as docs/performance.md says."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

REPO = Path(__file__).parents[2]
MEGABYTES = 50
MARGIN = 1.25  # sampled, and which buffers meet depends on who is late


def documented() -> dict[str, tuple[float, float]]:
    """Moment -> multiples of the model's parameters, as one fragment and as four."""
    table = {}
    for line in (REPO / "docs" / "performance.md").read_text().splitlines():
        row = re.match(r"\| ([a-z ]+) \| ([\d.]+)x \| ([\d.]+)x \|", line)
        if row:
            table[row[1]] = float(row[2]), float(row[3])
    return table


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, int]]:
    out = tmp_path_factory.mktemp("memory") / "peaks.json"
    command = [sys.executable, "-m", "tests.helpers.memory_probe", str(MEGABYTES), str(out)]
    done = subprocess.run(
        command,
        cwd=REPO,
        env={**os.environ, "MALLOC_MMAP_THRESHOLD_": "1048576"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:]
    return json.loads(out.read_text())


@pytest.mark.parametrize("setting", ["whole", "streaming"])
@pytest.mark.parametrize(
    "moment", ["founding", "window alone", "window with a peer", "serving a heal", "receiving a heal"]
)
def test_fr55_no_moment_needs_more_memory_than_is_written(moment, setting, measured):
    written = documented()[moment][setting == "streaming"]
    found = measured[setting][moment] / (MEGABYTES * 2**20)
    assert found <= MARGIN * written, f"{found:.2f} times the parameters, {written} are written"
