"""A stop signal before anything was started: never lost, and nothing is left behind."""

import contextlib
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from torchtitan_diloco.cli.local.folder import DataIdentity
from torchtitan_diloco.cli.local.launch import Edges, Request, launch
from torchtitan_diloco.cli.stop import StopRequests
from torchtitan_diloco.config.schema import RunConfig

QUICKSTART = Path(__file__).parents[3] / "train_configs" / "quickstart.toml"

LOST_IN_AN_IMPORT = """
import os, signal, sys
from torchtitan_diloco.cli import dispatch

class Extension:
    def find_spec(self, name, path=None, target=None):
        if name == "psutil":
            try:
                os.kill(os.getpid(), signal.SIGINT)
            except KeyboardInterrupt:
                print("lost")

sys.meta_path.insert(0, Extension())
sys.exit(dispatch(["run", sys.argv[1]]))
"""


def stopped_launch(folder: Path, stop: StopRequests, prepare: Callable[[], object]) -> None:
    config = RunConfig()
    config.job.dump_folder, config.job.name, config.semi_sync.method = (
        str(folder / "outputs"),
        "trial",
        "none",
    )

    def prepared(config: RunConfig, ranks: dict[int, int]) -> DataIdentity:
        prepare()
        return DataIdentity()

    def never(*_: object) -> list[str]:
        raise AssertionError("an island was started")

    request = Request(config=config, ranks={0: 1}, max_restarts=0, fresh=False)
    with pytest.raises(KeyboardInterrupt):
        launch(request, Edges(command=never, prepare=prepared, stop=stop))


def test_signals_close_to_one_another_are_one_request() -> None:
    times = [0.0, 0.5, 1.6]
    stop = StopRequests(now=lambda: times[0])
    while times:
        stop.receive()
        times.pop(0)
    assert stop.count == 2


def test_one_that_came_during_the_imports_ends_the_command_before_it_writes(tmp_path: Path) -> None:
    stop = StopRequests()
    stop.receive()
    stopped_launch(tmp_path, stop, prepare=lambda: pytest.fail("prepared"))
    assert not list(tmp_path.iterdir())


def test_one_during_the_preparation_interrupts_it(tmp_path: Path) -> None:
    stop = StopRequests()

    def prepare() -> None:
        stop.receive()
        pytest.fail("went on")

    stopped_launch(tmp_path, stop, prepare)
    assert not list(tmp_path.iterdir())


def test_one_that_the_preparation_loses_ends_it_afterwards(tmp_path: Path) -> None:
    stop = StopRequests()

    def prepare() -> None:
        with contextlib.suppress(KeyboardInterrupt):  # as the import of an extension module can
            stop.receive()

    stopped_launch(tmp_path, stop, prepare)
    assert not list(tmp_path.iterdir())


def test_the_command_counts_from_before_its_imports(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", LOST_IN_AN_IMPORT, str(QUICKSTART)],
        cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "interrupted\n")
    assert not list(tmp_path.iterdir())
