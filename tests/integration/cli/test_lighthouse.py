"""`torchtitan-diloco lighthouse`: wrong usage in one sentence, the port in a file, an end on SIGTERM."""

import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.helpers.launcher import eventually
from torchtitan_diloco.cli import lighthouse
from torchtitan_diloco.cli.local.server import require_reachable
from torchtitan_diloco.errors import UserError

LIGHTHOUSE = "lighthouse.address", "lighthouse --bind"


def test_it_writes_its_port_listens_on_loopback_and_ends_well_on_sigterm(tmp_path: Path) -> None:
    port_file = tmp_path / "port"
    command = [
        sys.executable,
        "-m",
        "torchtitan_diloco",
        "lighthouse",
        "--bind",
        "127.0.0.1:0",
        "--port-file",
        str(port_file),
    ]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as server:
        try:
            eventually(port_file.exists, within_s=30)
            require_reachable(f"http://127.0.0.1:{int(port_file.read_text())}", *LIGHTHOUSE)
            server.send_signal(signal.SIGTERM)
            assert server.wait(timeout=10) == 0
        finally:
            server.kill()
    assert list(tmp_path.iterdir()) == [port_file]


def test_a_taken_port_is_refused_naming_it_and_the_remedy() -> None:
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = holder.getsockname()[1]
        with pytest.raises(
            UserError, match=rf"^--bind 127.0.0.1:{port}: port {port} is taken .* 127.0.0.1:0 for a free"
        ):
            lighthouse.main(["--bind", f"127.0.0.1:{port}"])
    assert not signal.pthread_sigmask(signal.SIG_BLOCK, ()) & {signal.SIGTERM, signal.SIGINT}


@pytest.mark.parametrize("bind", ["29510", "127.0.0.1:", "127.0.0.1:http"])
def test_a_bind_that_is_no_host_and_port_is_refused_naming_it(bind: str) -> None:
    with pytest.raises(UserError, match=r"^--bind .* not HOST:PORT"):
        lighthouse.main(["--bind", bind])


def test_without_torchft_it_says_what_to_use_instead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lighthouse.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"no aarch64 wheel.*lighthouse\.address"):
        lighthouse.main([])


@pytest.mark.parametrize("address", ["http://", "http://host", "http://host:port"])
def test_an_address_without_host_and_port_is_refused_naming_the_setting(address: str) -> None:
    with pytest.raises(UserError, match=r"^lighthouse\.address: .* is not an address"):
        require_reachable(address, *LIGHTHOUSE)


def test_an_unreachable_address_is_refused_within_the_wait() -> None:
    with socket.socket() as full:
        full.bind(("127.0.0.1", 0))
        # Bound but not listening: connections are refused.
        began = time.monotonic()
        with pytest.raises(UserError, match=r"^lighthouse\.address: nothing answers"):
            require_reachable(
                f"http://127.0.0.1:{full.getsockname()[1]}",
                "lighthouse.address",
                "lighthouse --bind",
                wait_s=1.0,
            )
        assert time.monotonic() - began < 2
