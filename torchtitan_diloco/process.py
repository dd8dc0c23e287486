"""No process outlives the one that started it: the kernel's parent-death signal, and adoption of orphans.

Linux only; elsewhere both calls do nothing and the callers' own clean-up is all there is.
"""

import ctypes
import os
import signal as signals
import sys

LAUNCHER_PID = "TORCHTITAN_DILOCO_LAUNCHER_PID"
"""Environment variable: the process that must be among the ancestors of everything it started."""

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36

# Loaded at import and not at first use: between fork and exec nothing may be looked up or allocated by dlopen.
_libc = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None


def die_with_parent(signal: int = signals.SIGKILL, parent: int | None = None) -> None:
    """Have the kernel send `signal` to this process when its parent's thread that started it ends.

    The setting survives exec and is not inherited by forks, so every level of a process tree calls this itself.
    A parent that died before the call would go unnoticed; that race is closed by comparing the parent afterwards
    with `parent` (a pid; by default the parent at entry) and, where `LAUNCHER_PID` is in the environment, by
    looking for that process among the ancestors. If either is gone the process sends `signal` to itself.

    Raises OSError where the kernel refuses. Source: prctl(2), PR_SET_PDEATHSIG.
    """
    if _libc is None:
        return
    expected = os.getppid() if parent is None else parent
    _prctl(_PR_SET_PDEATHSIG, int(signal))
    launcher = os.environ.get(LAUNCHER_PID)
    orphaned = os.getppid() != expected or (launcher is not None and not _descends_from(int(launcher)))
    if orphaned:
        os.kill(os.getpid(), signal)


def adopt_orphans() -> None:
    """Become the parent of descendants whose own parent dies, so that they stay within reach of a final sweep.

    Raises OSError where the kernel refuses. Source: prctl(2), PR_SET_CHILD_SUBREAPER.
    """
    if _libc is not None:
        _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def _prctl(option: int, value: int) -> None:
    assert _libc is not None
    if _libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0) != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"prctl({option}): {os.strerror(error)}")


def _descends_from(ancestor: int) -> bool:
    pid = os.getppid()
    while pid > 1 and pid != ancestor:
        try:
            with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as stat:
                # The command name, in brackets, may hold blanks and brackets; the parent's pid is second after it.
                pid = int(stat.read().rpartition(")")[2].split()[1])
        except FileNotFoundError:
            return False
    return pid == ancestor
