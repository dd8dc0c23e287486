"""The benchmarks' emulated network for tests: what a test needs to run there, and islands that end with it."""

import importlib.util
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import pytest

REPO = Path(__file__).parents[2]

needs_root = pytest.mark.skipif(
    sys.platform != "linux" or os.geteuid() != 0, reason="network namespaces need root on Linux"
)
"""Skips where they cannot be had; as root, one that cannot be made is a failure."""


def emulated_wan() -> ModuleType:
    """``benchmarks/emulated_wan.py``, which belongs to no package."""
    spec = importlib.util.spec_from_file_location("emulated_wan", REPO / "benchmarks" / "emulated_wan.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclasses look themselves up
    spec.loader.exec_module(module)
    return module


@contextmanager
def running(command: list[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A program, ended with the block; what it says goes to ``log``."""
    environment = {
        k: v for k, v in os.environ.items() if k != "GLOO_SOCKET_IFNAME"
    }  # the loopback, set for other tests
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            cwd=REPO,
            env={**environment, "PYTHONPATH": str(REPO)},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
