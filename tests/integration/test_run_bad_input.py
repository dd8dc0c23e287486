"""Wrong input to `run`: refused within seconds, in one sentence that names the setting, with nothing half-written."""

import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.helpers.real_run import offline, write_config
from torchtitan_diloco.data.prepare import prepare


@dataclass(frozen=True)
class Refusal:
    code: int
    words: str
    seconds: float


def refuse(cwd: Path, config: Path, *arguments: str) -> Refusal:
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "torchtitan_diloco", "run", str(config), *arguments],
        cwd=cwd,
        env=offline(),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stdout == ""
    return Refusal(done.returncode, done.stderr, time.monotonic() - began)


@pytest.fixture
def config(tmp_path: Path, corpus: Path) -> Path:
    return write_config(tmp_path, corpus)


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as holder:
        yield holder.getsockname()[1]


def tiny_corpus(folder: Path) -> Path:
    """A corpus of fewer sequences than a batch."""
    text = folder / "short.txt"
    text.write_text("In the beginning God created the heaven and the earth. " * 12)
    prepare([text], "bundled:bpe2048", 64, folder / "short")
    return folder / "short"


def replaced(config: Path, old: str, new: str) -> Path:
    text = config.read_text()
    assert old in text
    config.write_text(text.replace(old, new))
    return config


# name -> (what to do to the configuration file, arguments, what the sentence begins with, what else it says)
CASES: dict[str, tuple[Callable[[Path], object], tuple[str, ...], str, str]] = {
    "missing tokenizer": (
        lambda c: None, ("--model.hf_assets_path", "nowhere"), "model.hf_assets_path: ", '"nowhere" does not exist',
    ),
    "folder without tokenizer": (
        lambda c: (c.parent / "empty").mkdir(), ("--model.hf_assets_path", "empty"),
        "model.hf_assets_path: ", "holds no tokenizer.json",
    ),
    "missing data": (
        lambda c: replaced(c, "kjv-64", "no-such-corpus"), (), "data.sources.path: ", "no prepared corpus at",
    ),
    "corpus smaller than a batch": (
        lambda c: replaced(c, _line(c, "path"), f'path = "{tiny_corpus(c.parent)}"'),
        ("--training.local_batch_size", "32"), "data.sources.path: ", "fewer than one batch of 32 ",
    ),
    "corpus of another length": (
        lambda c: None, ("--training.seq_len", "128"), "training.seq_len: ", "was prepared for 64",
    ),
    "Lighthouse unreachable": (
        lambda c: None, ("--lighthouse.address", "http://127.0.0.1:9"),
        "lighthouse.address: ", "nothing answers at http://127.0.0.1:9",
    ),
    "unknown method": (
        lambda c: None, ("--semi_sync.method", "dilco"),
        "command line: semi_sync.method: ", 'got "dilco"; did you mean "diloco"?',
    ),
    "unknown transport": (
        lambda c: None, ("--transport.kind", "pigeon"), "command line: transport.kind: ",
        'must be "gloo", "memory", "hub", "spool" or',
    ),
    "one port for two islands": (
        lambda c: None, ("--island.port", "23456"), "island.port: ", "the 2 islands",
    ),
    "unknown key": (
        lambda c: replaced(c, "sync_every", "sync_evry"), (),
        "{config}:{line}: semi_sync.sync_evry: ", "did you mean semi_sync.sync_every?",
    ),
    "no such file": (
        lambda c: c.unlink(), (), "{config}: ", "no such file",
    ),
    "ranks that fit no island": (lambda c: None, ("--ranks", "1,1,1"), "--ranks 1,1,1: ", "3 numbers for 2 islands"),
}  # fmt: skip


def _line(config: Path, begins: str) -> str:
    return next(line for line in config.read_text().splitlines() if line.startswith(begins))


@pytest.mark.parametrize("case", CASES)
def test_run_refuses_in_one_sentence_that_names_the_setting_and_writes_nothing(
    case: str, config: Path, tmp_path: Path
) -> None:
    change, arguments, begins, says = CASES[case]
    change(config)
    before = sorted(tmp_path.iterdir())
    refusal = refuse(tmp_path, config, *arguments)
    text = config.read_text().splitlines() if config.exists() else []
    line = next((n for n, words in enumerate(text, 1) if "evry" in words), 0)
    assert refusal.code == 2
    assert refusal.words.startswith("error: " + begins.format(config=config, line=line)), refusal.words
    assert says in refusal.words and "Traceback" not in refusal.words
    assert sorted(tmp_path.iterdir()) == before
    assert refusal.seconds < 30  # of which the machine may be busy with other things most


def test_run_refuses_a_taken_island_port(config: Path, tmp_path: Path, taken_port: int) -> None:
    refusal = refuse(tmp_path, config, "--islands", "1", "--island.port", str(taken_port))
    assert refusal.code == 2 and refusal.seconds < 10
    assert refusal.words == (
        f"error: island.port: {taken_port} is taken on this machine; choose another, or 0 for a free one\n"
    )
    assert not (tmp_path / "outputs").exists()


@pytest.fixture
def full_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system with 64 KB left."""
    if os.geteuid() != 0 or shutil.which("mount") is None:
        pytest.skip("a full disk is made with a small tmpfs, which takes root and mount")
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)],
        capture_output=True,
        text=True,
        check=False,
    )
    if mounted.returncode:
        pytest.skip(
            f"a full disk is made with a small tmpfs, which this machine refuses: {mounted.stderr.strip()}"
        )
    try:
        (disk / "ballast").write_bytes(bytes(960 * 1024))
        yield disk
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_run_refuses_a_full_disk_and_leaves_nothing_on_it(
    config: Path, tmp_path: Path, full_disk: Path
) -> None:
    refusal = refuse(tmp_path, config, "--job.dump_folder", str(full_disk / "runs"))
    assert refusal.code == 2 and refusal.seconds < 10
    assert (
        refusal.words.startswith("error: job.dump_folder: cannot write ")
        and "the disk is full" in refusal.words
    )
    assert [path.name for path in full_disk.iterdir()] == ["ballast"]


def test_run_refuses_to_prepare_a_corpus_on_a_full_disk_and_leaves_nothing_on_it(
    config: Path, tmp_path: Path, full_disk: Path
) -> None:
    replaced(config, _line(config, "path"), f'path = "{full_disk}/corpus"\nprepare_from = "bundled:kjv"')
    refusal = refuse(tmp_path, config)
    assert refusal.code == 2 and refusal.seconds < 30
    assert refusal.words.startswith(f"error: data.sources.path: no room to write {full_disk}/corpus")
    assert [p.name for p in full_disk.iterdir() if p.name.startswith("corpus") or p.is_dir()] == []
    assert not (tmp_path / "outputs").exists()


def test_run_leaves_an_earlier_run_untouched_when_the_next_command_is_wrong(
    config: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "outputs" / "trial"
    (folder / "island-0").mkdir(parents=True)
    (folder / "config.toml").write_text("[job]\nname = 'trial'\n")
    (folder / "run.json").write_text(
        '{"run_id": "1", "created": "2026", "digests": {"data": [], "tokenizer": null}}'
    )
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    assert refuse(tmp_path, config, "--semi_sync.method", "dilco").code == 2
    assert refuse(tmp_path, config, "--model.hf_assets_path", "nowhere").code == 2
    after = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.name != ".lock"}
    assert after == before
