"""A run where nothing but the loopback can be reached."""

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.helpers.megatron import some_documents, write_megatron

REPO = Path(__file__).parents[2]
CONFIG = """
[job]
dump_folder = "outputs"
name = "offline"
[model]
name = "llama3"
flavor = "debugmodel"
hf_assets_path = "bundled:bpe2048"
[data]
shards = 8
[[data.sources]]
path = "data/kjv"
prepare_from = "bundled:kjv"
weight = 3.0
[[data.sources]]
path = "data/megatron.bin"
[training]
local_batch_size = 4
seq_len = 64
steps = 6
mixed_precision_param = "float32"
[activation_checkpoint]
mode = "none"
[metrics]
log_freq = 1
[semi_sync]
sync_every = 3
num_islands = 1
"""
GUARD = """
import os, socket
_connect = socket.socket.connect
def connect(self, address):
    host = address[0] if isinstance(address, tuple) else ""
    port = address[1] if isinstance(address, tuple) else 0
    outside = isinstance(address, tuple) and not (host.startswith("127.") or host in ("::1", "localhost"))
    if (outside and self.type != socket.SOCK_DGRAM) or port == int(os.environ["PROXY_PORT"]):
        with open(os.environ["GUARD_LOG"], "a") as log:
            log.write(f"{os.getpid()} {address}\\n")
        raise OSError(f"no network here: {address}")
    return _connect(self, address)
socket.socket.connect = connect
_resolve = socket.getaddrinfo
def getaddrinfo(host, *rest, **named):
    if host not in (None, "", "localhost", "127.0.0.1", "::1", "0.0.0.0", socket.gethostname()):
        with open(os.environ["GUARD_LOG"], "a") as log:
            log.write(f"{os.getpid()} look-up of {host}\\n")
    return _resolve(host, *rest, **named)
socket.getaddrinfo = getaddrinfo
with open(os.environ["GUARD_LOG"] + ".loaded", "a") as log:
    log.write(f"{os.getpid()}\\n")
"""


@pytest.mark.timeout(240)
def test_fr23_without_a_network_everything_starts_and_nothing_is_dialled(tmp_path: Path) -> None:
    """Proxies at a closed port, Hugging Face offline; a mixture of a fresh corpus and a Megatron one, to the end."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]  # closed again at once
    (tmp_path / "guard").mkdir()
    (tmp_path / "guard" / "sitecustomize.py").write_text(GUARD)
    (tmp_path / "data").mkdir()
    write_megatron(tmp_path / "data" / "megatron", some_documents(600))
    (tmp_path / "run.toml").write_text(CONFIG)
    proxy = f"http://127.0.0.1:{port}"
    environment = {
        **os.environ,
        **dict.fromkeys(("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"), proxy),
        "no_proxy": "", "NO_PROXY": "", "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1", "PROXY_PORT": str(port), "GUARD_LOG": str(tmp_path / "guard.log"),
        "PYTHONPATH": f"{tmp_path / 'guard'}{os.pathsep}{REPO}",
    }  # fmt: skip
    command = [sys.executable, "-m", "torchtitan_diloco", "run", "run.toml", "--islands", "1", "--ranks", "1"]
    began = time.time()
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=220, check=False
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-5000:]
    island = tmp_path / "outputs" / "offline" / "island-0"
    events = [json.loads(line) for line in (island / "events.jsonl").read_text().splitlines()]
    first = next(event for event in events if event["event"] == "inner")
    assert first["t"] - began < 120  # seconds, not the minutes of retries
    assert (
        len((tmp_path / "guard.log.loaded").read_text().split()) >= 2
    )  # the guard was there, in the trainer too
    dialled = tmp_path / "guard.log"
    assert not dialled.exists(), dialled.read_text()

    audit = [sys.executable, "-m", "torchtitan_diloco", "data", "audit", str(island.parent), "--json"]
    report = json.loads(subprocess.run(audit, cwd=tmp_path, capture_output=True, check=True).stdout)
    consumed = {Path(row["path"]).name: row["consumed"] for row in report["epochs"]}
    assert sum(consumed.values()) == 6 * 4
    assert abs(consumed["kjv"] - 18) <= 2  # three to one


def test_fr23_a_missing_corpus_is_one_message_with_its_path_and_the_command(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(CONFIG.replace('prepare_from = "bundled:kjv"', ""))
    command = [sys.executable, "-m", "torchtitan_diloco", "run", "run.toml", "--islands", "2", "--ranks", "2"]
    done = subprocess.run(
        command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(REPO)}, capture_output=True, text=True,
        timeout=100, check=False,
    )  # fmt: skip
    said = done.stdout + done.stderr
    assert done.returncode == 2 and "Traceback" not in said
    assert said.count("no prepared corpus") == 1  # not one for each rank
    assert "data.sources.path: no prepared corpus at data/kjv" in said
    assert "torchtitan-diloco data prepare --input FILE" in said
