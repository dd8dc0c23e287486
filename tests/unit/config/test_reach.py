"""Whether a Lighthouse is there is asked and said before anything slow is imported."""

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from torchtitan_diloco.config import reach
from torchtitan_diloco.config.schema import RunConfig
from torchtitan_diloco.errors import UserError
from torchtitan_diloco.observe.events import write_json

QUICKSTART = Path(__file__).parents[3] / "train_configs" / "quickstart.toml"


class Clock:
    def __init__(self) -> None:
        self.seconds = 0.0
        self.said: list[str] = []

    def wait(self, config: RunConfig) -> None:
        reach.await_lighthouse(config, self.said.append, now=lambda: self.seconds, sleep=self.sleep)

    def sleep(self, seconds: float) -> None:
        self.seconds += seconds


@pytest.fixture
def config() -> RunConfig:
    config = RunConfig()
    config.semi_sync.method = "diloco"
    config.lighthouse.address = "http://127.0.0.1:9"
    return config


def test_one_that_is_there_costs_no_word(config: RunConfig) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        config.lighthouse.address = f"http://127.0.0.1:{server.getsockname()[1]}"
        clock = Clock()
        clock.wait(config)
    assert clock.said == [] and clock.seconds == 0


@pytest.mark.parametrize("patience_s, limit_s", [(600.0, 30), (4.0, 4)])
def test_one_that_is_not_there_is_said_at_once_and_refused_in_time(
    config: RunConfig, patience_s: float, limit_s: int
) -> None:
    config.lighthouse.patience_s = patience_s
    clock = Clock()
    with pytest.raises(UserError) as caught:
        clock.wait(config)
    where = "http://127.0.0.1:9"
    assert clock.said == [
        f"waiting at most {limit_s} s for the Lighthouse at {where} (lighthouse.address): Connection refused"
    ]
    assert str(caught.value) == (
        f"lighthouse.address = {where}: no Lighthouse answers there within {limit_s} s (Connection refused); start one with "
        "`torchtitan-diloco lighthouse` or correct the address"
    )
    assert clock.seconds == pytest.approx(limit_s, abs=1)


def test_one_that_comes_a_little_later_is_waited_for(
    config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = iter(["Connection refused"] * 5 + [""])
    monkeypatch.setattr(reach, "why_unreachable", lambda address: next(answers))
    clock = Clock()
    clock.wait(config)
    assert len(clock.said) == 1 and clock.seconds == 5 * reach.RETRY_S


@pytest.mark.parametrize(
    "address, message",
    [
        ("", "lighthouse.address is empty: start one with `torchtitan-diloco lighthouse`"),
        ("http://host", "lighthouse.address = http://host: write it as http://HOST:PORT"),
    ],
)
def test_what_is_no_address_is_refused_without_waiting(config: RunConfig, address: str, message: str) -> None:
    config.lighthouse.address = address
    clock = Clock()
    with pytest.raises(UserError, match=message):
        clock.wait(config)
    assert clock.said == [] and clock.seconds == 0


def test_a_run_that_needs_none_is_not_asked(config: RunConfig) -> None:
    config.lighthouse.address = ""
    for method, kind in (("none", "gloo"), ("diloco", "memory"), ("of_a_third_party", "gloo")):
        config.semi_sync.method, config.transport.kind = method, kind
        Clock().wait(config)


@pytest.mark.parametrize("state", ["running", "done"])
def test_the_trainer_refuses_before_it_imports_anything_slow(tmp_path: Path, state: str) -> None:
    """Unless the island has finished: then there may be nobody left to meet."""
    island = tmp_path / "outputs" / "trial" / "island-0"
    island.mkdir(parents=True)
    write_json(island / "state.json", {"state": state})
    program = (
        "import sys; from torchtitan_diloco import train\n"
        "try: train.find_lighthouse(train.load_config(sys.argv[1], sys.argv[2:]))\n"
        "except train.UserError as error: print(error)\n"
        "print('torch' in sys.modules)"
    )
    arguments = ["--job.name", "trial", "--lighthouse.address", "http://127.0.0.1:9"]
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", program, str(QUICKSTART), *arguments, "--lighthouse.patience_s", "0.6"],
        cwd=tmp_path, env={**os.environ, "RANK": "0"}, capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    refused = ["lighthouse.address = http://127.0.0.1:9: no Lighthouse answers there within 0.6 s"]
    lines = done.stdout.splitlines()
    assert lines[-1] == "False"
    assert [line.partition(" (")[0] for line in lines[:-1]] == (refused if state == "running" else [])
    assert time.monotonic() - began < 30
