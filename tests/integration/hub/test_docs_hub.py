"""The commands and configurations of docs/hub.md, as written, in the order of the page; but for those that need ssh."""

import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.helpers.certificates import DOCS, HOST
from torchtitan_diloco.config.load import load_config

BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", DOCS.read_text(), flags=re.MULTILINE | re.DOTALL)
REPO = DOCS.parents[1]


@pytest.mark.timeout(120)
def test_the_page_does_what_it_says(tmp_path: Path) -> None:
    bin_ = tmp_path / "bin"
    bin_.mkdir()
    command = bin_ / "torchtitan-diloco"
    command.write_text(f'#!/bin/bash\nexec {shlex.quote(sys.executable)} -m torchtitan_diloco "$@"\n')
    command.chmod(0o755)
    env = {**os.environ, "PYTHONPATH": str(REPO), "PATH": f"{bin_}:{os.environ['PATH']}", "NO_PROXY": "*"}
    hub: subprocess.Popen[bytes] | None = None
    port, printed = "29520", []
    try:
        for language, block in BLOCKS:
            block = block.replace(f"DNS:{HOST}", "IP:127.0.0.1").replace(HOST, "127.0.0.1")
            if language == "toml":
                name = re.match(r"# (\w+\.toml)\n", block)[1]  # type: ignore[index]
                (tmp_path / name).write_text(
                    block.replace("0.0.0.0:29520", "127.0.0.1:0").replace("29520", port)
                )
                load_config(tmp_path / name)
                continue
            if block.startswith("ssh"):
                continue
            if block.startswith("torchtitan-diloco syncer"):
                words = [*shlex.split(block), "--port-file", "port"]
                log = open(tmp_path / "log", "wb")  # noqa: SIM115 - the child's
                hub = subprocess.Popen(words, cwd=tmp_path, env=env, stderr=log)
                deadline = time.monotonic() + 60
                while not (tmp_path / "port").exists():
                    assert hub.poll() is None and time.monotonic() < deadline, (tmp_path / "log").read_text()
                    time.sleep(0.1)
                port = (tmp_path / "port").read_text().strip()
                continue
            script = block.replace("29520", port)
            done = subprocess.run(
                ["bash", "-uc", script], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60, check=False
            )  # fmt: skip
            printed.append((block.split()[0], done.stdout, done.stderr, done.returncode))
        assert hub is not None
        hub.send_signal(signal.SIGTERM)
        assert hub.wait(20) == 0
    finally:
        if hub is not None:
            hub.kill()
    made, tokens, preflight, tried, seen = printed
    assert preflight[3] == 0 and "nothing failed" in preflight[1], preflight
    assert made[3] == 0 and tokens[3] == 0, (made, tokens)
    assert tried[1] == "403\n", tried
    assert '"run":"our-run"' in seen[1] and "410" in seen[2], seen  # there is no island 1 to evict
    log_text = (tmp_path / "log").read_text()
    for line in (tmp_path / "tokens.toml").read_text().splitlines():
        assert shlex.split(line)[2] not in log_text
    assert [oct(p.stat().st_mode & 0o777) for p in sorted(tmp_path.glob("*.token"))] == ["0o600"] * 4
