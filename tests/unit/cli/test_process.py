"""Children die with their parents, whatever kills those."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.helpers.launcher import eventually
from torchtitan_diloco.process import LAUNCHER_PID

PARENT = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", sys.argv[1]])
print(child.pid, flush=True)
time.sleep(60)
"""
CHILD = """
import signal, time
from torchtitan_diloco.process import die_with_parent
{ignore}
die_with_parent()
open({ready!r}, "w").close()
time.sleep(60)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_child_dies_with_its_parent_even_if_it_ignores_sigterm(tmp_path: Path, number: int) -> None:
    ready = tmp_path / "ready"
    child_code = CHILD.format(ready=str(ready), ignore="signal.signal(signal.SIGTERM, signal.SIG_IGN)")
    with subprocess.Popen(
        [sys.executable, "-c", PARENT, child_code], stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout
        child = psutil.Process(int(parent.stdout.readline()))
        eventually(ready.exists)
        parent.send_signal(number)
        parent.wait()
    eventually(lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE, within_s=3)


def test_a_process_whose_launcher_is_gone_before_it_looks_ends_itself(tmp_path: Path) -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    code = CHILD.format(ready=str(tmp_path / "ready"), ignore="")
    orphan = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, LAUNCHER_PID: str(gone.pid)}, timeout=20, check=False
    )
    assert orphan.returncode == -signal.SIGKILL
    assert not (tmp_path / "ready").exists()


def test_a_process_whose_launcher_is_an_ancestor_lives_on() -> None:
    code = "from torchtitan_diloco.process import die_with_parent; die_with_parent()"
    environment = {**os.environ, LAUNCHER_PID: str(os.getppid())}
    assert (
        subprocess.run([sys.executable, "-c", code], env=environment, timeout=20, check=False).returncode == 0
    )
