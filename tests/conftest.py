"""Tiers by folder, one time limit per test, and an environment that keeps tests on the loopback and on one thread."""

import os

# Before torch is imported anywhere: gloo would otherwise resolve the host name, and each rank would take all cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
os.environ.setdefault("RUST_LOG", "warn")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_DATASETS_OFFLINE", "1")

import tempfile
from pathlib import Path

import pytest

if "XDG_CACHE_HOME" not in os.environ:
    # What is remembered of corpora that were checked stays out of the home folder.
    CACHE = tempfile.TemporaryDirectory(prefix="tests-cache-")
    os.environ["XDG_CACHE_HOME"] = CACHE.name

TIERS = {"unit": 60, "exhaustive": 300, "integration": 300}
"""Folder below tests/, which is also the marker, and the seconds a test of it may take unless it says otherwise."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    root = Path(__file__).parent
    for item in items:
        tier = item.path.relative_to(root).parts[0]
        if tier not in TIERS:
            raise pytest.UsageError(f"{item.path}: tests live in one of {sorted(TIERS)} below tests/")
        item.add_marker(tier)
        if (
            item.get_closest_marker("xdist_group") is None
        ):  # a file's tests share its runs: one process does them all
            item.add_marker(pytest.mark.xdist_group(str(item.path.relative_to(root))))
        if item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(TIERS[tier]))
