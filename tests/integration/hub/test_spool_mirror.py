"""scripts/spool_mirror.sh between two folders of this machine, or through a remote shell that only looks like one."""

import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[3] / "scripts" / "spool_mirror.sh"
ONCE = ("--once", "--retries", "2", "--wait", "0")

pytestmark = [
    pytest.mark.timeout(60),
    pytest.mark.skipif(shutil.which("rsync") is None, reason="rsync is not installed (.ci/run installs it)"),
]


def mirror(*words: str | Path, **options) -> subprocess.CompletedProcess[str]:
    command = ["bash", str(SCRIPT), *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=50, check=False, **options)


@pytest.fixture
def spools(tmp_path):
    """The site's folder and the hub's."""
    site, hub = tmp_path / "site", tmp_path / "hub"
    for folder in (site, hub):
        (folder / "up" / "run").mkdir(parents=True)
        (folder / "down" / "run").mkdir(parents=True)
    return site, hub


def write(path: Path, content: str = "x") -> Path:
    path.write_text(content)
    return path


def test_it_copies_both_ways_and_deletes_what_the_writer_has_deleted(spools):
    site, hub = spools
    said = write(site / "up" / "run" / "slot-1.json")
    write(site / "up" / "run" / "slot-1.bin", "payload")
    answer = write(hub / "down" / "run" / "slot-1.json")
    write(site / "up" / "run" / ".slot-2.bin.123", "in the making")
    write(site / "up" / "run" / "readme.txt", "foreign")
    assert mirror(*ONCE, site, hub).returncode == 0
    assert (hub / "up" / "run" / "slot-1.bin").read_text() == "payload"
    assert sorted(p.name for p in (hub / "up" / "run").iterdir()) == ["slot-1.bin", "slot-1.json"]
    assert (site / "down" / "run" / "slot-1.json").exists()
    said.unlink()
    answer.unlink()
    assert mirror(*ONCE, site, hub).returncode == 0
    assert not (hub / "up" / "run" / "slot-1.json").exists()
    assert not (site / "down" / "run" / "slot-1.json").exists()
    assert (hub / "up" / "run" / "slot-1.bin").exists()


def test_a_file_that_is_there_is_never_written_again(spools):
    site, hub = spools
    write(site / "up" / "run" / "slot-1.bin", "changed")
    kept = write(hub / "up" / "run" / "slot-1.bin", "first")
    assert mirror(*ONCE, site, hub).returncode == 0
    assert kept.read_text() == "first"


def remote_shell(folder: Path, failures: int) -> Path:
    """Stands in for ssh: notes that it was called, fails the first times, then runs the command here."""
    script = folder / "rsh"
    script.write_text(
        f"""#!/bin/bash
echo call >> {folder}/calls
[ "$(wc -l < {folder}/calls)" -gt {failures} ] || exit 255
shift
exec bash -c "$*"
"""
    )
    script.chmod(0o755)
    return script


def test_it_tries_again_when_the_site_does_not_answer(spools, tmp_path):
    site, hub = spools
    write(site / "up" / "run" / "slot-1.json")
    options = ("--once", "--retries", "3", "--wait", "0", "--bwlimit", "1m")
    done = mirror(*options, "--rsh", remote_shell(tmp_path, 2), f"centre:{site}", hub)
    assert done.returncode == 0, done.stderr
    assert (hub / "up" / "run" / "slot-1.json").exists()
    assert len((tmp_path / "calls").read_text().splitlines()) == 6  # two failed, then four transfers


def test_a_site_that_is_away_is_said_once_and_nothing_is_deleted(spools, tmp_path):
    site, hub = spools
    write(site / "up" / "run" / "slot-1.json")
    copy = write(hub / "up" / "run" / "slot-0.json")
    words = [
        "--every",
        "0.2",
        "--retries",
        "1",
        "--rsh",
        str(remote_shell(tmp_path, 3)),
        f"centre:{site}",
        str(hub),
    ]
    process = subprocess.Popen(
        ["bash", str(SCRIPT), *words], stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        while not (tmp_path / "calls").exists():
            time.sleep(0.05)
        assert copy.exists()
        deadline = time.monotonic() + 30
        while not (hub / "up" / "run" / "slot-1.json").exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        second = mirror(*ONCE, site, hub)
        assert second.returncode == 3 and "another mirror" in second.stderr
        time.sleep(1.0)
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        _, said = process.communicate()
    assert (hub / "up" / "run" / "slot-1.json").exists()
    assert said.count("out of reach") == 1 and said.count("is back") == 1


def test_parts_go_before_the_manifests_that_name_them(spools, tmp_path):
    site, hub = spools
    write(site / "up" / "run" / "slot-1.json")
    write(site / "up" / "run" / "slot-1.bin")
    # Cut off after the first transfer.
    shell = remote_shell(tmp_path, 0)
    shell.write_text(shell.read_text().replace("-gt 0 ]", "-le 1 ]"))
    assert mirror(*ONCE, "--rsh", shell, f"centre:{site}", hub).returncode == 1
    assert sorted(p.name for p in (hub / "up" / "run").iterdir()) == ["slot-1.bin"]


def test_wrong_usage_prints_how_it_is_used(tmp_path):
    done = mirror("--nonsense", tmp_path / "a", tmp_path / "b")
    assert done.returncode == 2 and "unknown option" in done.stderr
    assert "spool_mirror.sh [options]" in mirror(tmp_path).stderr
