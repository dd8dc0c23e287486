"""Islands as on a cluster, each a torchrun of its own at one Lighthouse: they train together, or refuse in one sentence."""

import contextlib
import json
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers import event_schema
from tests.helpers.real_run import HandStarted, offline, traces_of_ours, write_config
from torchtitan_diloco.data.prepare import prepare

OTHER_TEXT = "And God said, Let there be light: and there was light. "


@pytest.fixture(scope="module")
def lighthouse(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Address of one that `torchtitan-diloco lighthouse` serves, on a free port."""
    folder = tmp_path_factory.mktemp("lighthouse")
    command = ["lighthouse", "--bind", "127.0.0.1:0", "--port-file", str(folder / "port")]
    server = subprocess.Popen(
        [sys.executable, "-m", "torchtitan_diloco", *command], cwd=folder, env=offline()
    )
    try:
        deadline = time.monotonic() + 60
        while not (folder / "port").exists():
            assert server.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
        yield f"http://127.0.0.1:{(folder / 'port').read_text().strip()}"
        server.terminate()
        assert server.wait(10) == 0
    finally:
        server.kill()


@pytest.fixture(scope="module")
def islands(
    tmp_path_factory: pytest.TempPathFactory, corpus: Path, lighthouse: str
) -> Iterator[list[HandStarted]]:
    """README's two commands: island 0 of 2 ranks and island 1 of 1 rank, each in a cluster (folder) of its own."""
    started = []
    with contextlib.ExitStack() as stack:
        for island, ranks in enumerate((2, 1)):
            cwd = tmp_path_factory.mktemp(f"cluster-{island}")
            arguments = (
                "--island.id",
                str(island),
                "--lighthouse.address",
                lighthouse,
                "--training.steps",
                "15",
            )
            started.append(HandStarted(cwd, write_config(cwd, corpus), *arguments, ranks=ranks))
            stack.callback(started[-1].stop)
        for one in started:
            assert one.end() == 0, one.output[-6000:]
        yield started


def test_two_islands_started_by_hand_train_one_model(islands: list[HandStarted]) -> None:
    digests = [one.digests(island) for island, one in enumerate(islands)]
    assert digests[0] == digests[1] and list(digests[0]) == [0, 1, 2]
    for island, one in enumerate(islands):
        events = one.events(island)
        assert event_schema.problems(events) == []
        rounds = [event for event in events if event["event"] == "round"]
        # tokens^2 / steps: with 2 ranks it has trained twice as many tokens, in batches twice as large.
        assert all(
            e["participants"] == [0, 1] and e["weights"] == pytest.approx([4 / 5, 1 / 5]) for e in rounds
        )
        assert [e["step"] for e in events if e["event"] == "inner"] == list(range(1, 16))
        assert {e["tokens"] for e in events if e["event"] == "inner"} == {(2 - island) * 64}
        assert one.state(island)["state"] == "done" and one.state(island)["step"] == 15


def test_islands_started_by_hand_log_no_stack_trace_and_no_abort(islands: list[HandStarted]) -> None:
    for one in islands:
        for words in ("Traceback", "FATAL", "core dumped", "terminate called"):
            assert words not in one.output
        assert one.processes() == []


@pytest.fixture(scope="module")
def taken_port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as holder:
        yield holder.getsockname()[1]


WRONG = {
    # name -> (arguments, the sentence)
    "tokenizer": (
        ("--model.hf_assets_path", "nowhere"),
        'model.hf_assets_path: folder "nowhere" does not exist',
    ),
    "port": (("--island.port", "TAKEN"), "island.port = TAKEN: cannot listen on 127.0.0.1:TAKEN"),
    "lighthouse": (
        ("--lighthouse.address", "http://127.0.0.1:9"),
        "lighthouse.address = http://127.0.0.1:9: no Lighthouse answers there",
    ),
    "batch": (("--training.local_batch_size", "40000"), "data.sources.path: "),
}


@pytest.fixture(scope="module")
def wrong(
    tmp_path_factory: pytest.TempPathFactory, corpus: Path, lighthouse: str, taken_port: int
) -> Iterator[dict[str, HandStarted]]:
    """Islands with one mistake each, two at a time, all ended."""
    started: dict[str, HandStarted] = {}
    with contextlib.ExitStack() as stack:
        for name, (arguments, _) in WRONG.items():
            for one in list(started.values())[:-1]:
                one.end()
            cwd = tmp_path_factory.mktemp(name)
            arguments = tuple(str(taken_port) if a == "TAKEN" else a for a in arguments)
            if name != "lighthouse":
                arguments = ("--lighthouse.address", lighthouse, *arguments)
            started[name] = HandStarted(cwd, write_config(cwd, corpus), *arguments, name=f"wrong-{name}")
            stack.callback(started[name].stop)
        for one in started.values():
            one.end()
        yield started


@pytest.mark.parametrize("name", WRONG)
def test_a_trainer_refuses_in_one_sentence_durably_and_without_a_stack_trace(
    wrong: dict[str, HandStarted], taken_port: int, name: str
) -> None:
    one, sentence = wrong[name], WRONG[name][1].replace("TAKEN", str(taken_port))
    assert one.process.returncode == 1  # torchrun's, whatever its child's was
    assert re.search(r"exitcode +: 2 ", one.output)
    state = one.state(0)
    assert event_schema.state_problems(state) == []
    assert state["state"] == "fatal" and state["reason"].startswith(sentence)
    assert one.output.count(f"error: {state['reason']}\n") == 1
    assert traces_of_ours(one.output) == []
    events = one.events(0)
    assert event_schema.problems(events) == []
    (error,) = [event for event in events if event["event"] == "error"]
    assert (error["kind"], error["message"]) == ("config", state["reason"])
    assert not (one.island(0) / "checkpoint").exists() or not any((one.island(0) / "checkpoint").iterdir())


def test_a_trainer_refuses_an_unknown_key_with_its_line(tmp_path: Path, corpus: Path) -> None:
    config = write_config(tmp_path, corpus)
    config.write_text(config.read_text().replace("sync_every", "sync_evry"))
    line = next(n for n, words in enumerate(config.read_text().splitlines(), 1) if "evry" in words)
    done = subprocess.run(
        [sys.executable, "-m", "torchtitan_diloco.train", "--job.config_file", str(config)],
        cwd=tmp_path, env=offline(), capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert done.stderr.startswith(f"error: {config}:{line}: semi_sync.sync_evry: unknown key")
    assert not (tmp_path / "outputs").exists()


def test_islands_with_different_corpora_refuse_to_train_together_naming_the_manifest(
    tmp_path: Path, corpus: Path, lighthouse: str
) -> None:
    text = tmp_path / "other.txt"
    text.write_text(OTHER_TEXT * 200)
    prepare([text], "bundled:bpe2048", 64, tmp_path / "other")
    started = []
    with contextlib.ExitStack() as stack:
        for island, data in enumerate((corpus, tmp_path / "other")):
            cwd = tmp_path / f"cluster-{island}"
            cwd.mkdir()
            arguments = ("--island.id", str(island), "--lighthouse.address", lighthouse)
            patience = ("--lighthouse.patience_s", "20")
            started.append(
                HandStarted(cwd, write_config(cwd, data), *arguments, *patience, name="differing-data")
            )
            stack.callback(started[-1].stop)
        for one in started:
            one.end()
        states = [one.state(island) for island, one in enumerate(started)]
    digests = [
        json.loads((data / "manifest.json").read_text())["digest"] for data in (corpus, tmp_path / "other")
    ]
    fatal = [state for state in states if state["state"] == "fatal"]
    assert fatal
    for state in fatal:
        assert "must agree on data manifest: " in state["reason"]
        assert all(digest in state["reason"] for digest in digests)
    # The other one may only have seen its peer go: it has not trained either, and may be started again.
    assert {state["state"] for state in states} <= {"fatal", "resume"}
    for island, one in enumerate(started):
        assert one.events(island, "inner") == []
        assert traces_of_ours(one.output) == []
