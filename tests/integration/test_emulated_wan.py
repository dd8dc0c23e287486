"""The emulated network of benchmarks and tests: its rate and delay are true, a cut is silent, and nothing stays behind."""

import contextlib
import json
import os
import subprocess
import sys
import time

import psutil
import pytest

from tests.helpers.wan import REPO, emulated_wan, needs_root, running

pytestmark = needs_root

SERVER = """
import socket, sys
listener = socket.create_server((sys.argv[1], 5001))
print("ready", flush=True)
while True:
    link, _ = listener.accept()
    while data := link.recv(1 << 20):
        link.sendall(b"." * (len(data) == 1))  # one byte is a ping
    link.close()
"""
CLIENT = """
import json, socket, sys, time
link = socket.create_connection((sys.argv[1], 5001))
def ping():
    began = time.monotonic()
    link.sendall(b"?")
    link.recv(1)
    return time.monotonic() - began
pings = [ping() for _ in range(5)]
began = time.monotonic()
link.sendall(bytes(int(sys.argv[2])))
link.shutdown(socket.SHUT_WR)
link.recv(1)
print(json.dumps({"ping": min(pings), "seconds": time.monotonic() - began}))
"""


@pytest.fixture
def wan():
    with emulated_wan().Wan(sites=2) as network:
        yield network


@pytest.fixture
def server(wan, tmp_path):
    log = tmp_path / "server.log"
    with running(wan.command(0, [sys.executable, "-c", SERVER, wan.address(0)]), log) as process:
        deadline = time.monotonic() + 20
        while "ready" not in log.read_text():
            assert process.poll() is None and time.monotonic() < deadline, log.read_text()
            time.sleep(0.05)
        yield process


def ask(wan, size: int) -> dict[str, float]:
    command = wan.command(1, [sys.executable, "-c", CLIENT, wan.address(0), str(size)])
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("rate, delay_s", [(40e6, 0.02), (10e6, 0.05)])
def test_packets_take_the_delay_and_no_more_than_the_rate_comes_through(wan, server, rate, delay_s):
    wan.set(rate, delay_s)
    before = wan.carried()["1>0"]["bytes"]
    size = int(rate * 2 / 8)  # two seconds' worth
    seen = ask(wan, size)
    assert 2 * delay_s <= seen["ping"] <= 2 * delay_s + 0.02
    # The last queue of bytes is on its way when the sender has got rid of it, but it waits for the far end to close.
    assert 2.0 <= seen["seconds"] <= 3.5
    carried = wan.carried()["1>0"]["bytes"] - before
    assert 1.03 * size <= carried <= 1.25 * size, (
        "40 or 52 bytes of headers a segment, and what was sent again"
    )


def test_an_unlimited_link_is_much_faster(wan, server):
    seen = ask(wan, 20_000_000)
    assert seen["ping"] < 0.02 and seen["seconds"] < 2.0


def test_a_cut_link_is_silent_and_comes_back(wan, server):
    code = "import socket, sys; socket.create_connection((sys.argv[1], 5001), timeout=1)"
    connect = wan.command(1, [sys.executable, "-c", code, wan.address(0)])
    wan.set(0.0, 0.0, up=False)
    cut = subprocess.run(connect, capture_output=True, text=True, timeout=30, check=False)
    assert "TimeoutError" in cut.stderr, "somebody has answered"
    wan.set(0.0, 0.0)
    assert subprocess.run(connect, timeout=30, check=False).returncode == 0


def test_the_machine_itself_is_out_of_reach(wan):
    code = "import socket; socket.create_connection(('192.0.2.1', 80), timeout=1)"
    command = wan.command(0, [sys.executable, "-c", code])
    tried = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert "Network is unreachable" in tried.stderr


def test_nothing_is_left_when_its_owner_is_killed(tmp_path):
    code = (
        "from emulated_wan import Wan; import subprocess, time\n"
        "wan = Wan(sites=2)\n"
        "print(wan.pid, flush=True)\n"
        "time.sleep(60)\n"
    )
    owner = subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(REPO / "benchmarks")},
    )
    try:
        assert owner.stdout is not None
        forwarder = psutil.Process(int(owner.stdout.readline()))
    finally:
        owner.kill()
        owner.wait()
    with contextlib.suppress(psutil.NoSuchProcess):
        forwarder.wait(10)
    assert not forwarder.is_running() or forwarder.status() == psutil.STATUS_ZOMBIE


def test_a_congestion_control_that_the_kernel_lacks_is_refused():
    with pytest.raises(RuntimeError, match="tcp_congestion_control"):
        emulated_wan().Wan(sites=2, congestion="pigeon")


def test_a_share_of_the_packets_with_data_is_lost_by_chance_and_always_the_same_ones():
    data, acknowledgement = bytes(10 + 1500), bytes(10 + 52)
    lost = []
    for _ in range(2):
        link = emulated_wan().Link(loss=0.1)
        for packet in (data, acknowledgement) * 1000:
            link.put(packet, 0.0)
        assert len(list(link.arrived(1.0))) + link.dropped == 2000
        lost.append(link.dropped)
    assert lost[0] == lost[1] and 70 <= lost[0] <= 130
