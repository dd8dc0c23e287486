"""A launcher over the fake trainer, started, watched and cleared away by tests."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.helpers.launcher import Run


@pytest.fixture
def start_run(tmp_path: Path) -> Iterator[Callable[..., Run]]:
    """`start_run(*arguments, **script)` starts a launcher; what is left of it is killed after the test."""
    runs: list[Run] = []

    def start(*arguments: str, **script: object) -> Run:
        runs.append(Run(tmp_path, *arguments, **script))
        return runs[-1]

    yield start
    for run in runs:
        if run.process.poll() is None:
            for process in run.tree():
                process.kill()
            run.process.kill()
            run.process.wait()
        if run.process.stdout:
            run.process.stdout.close()
