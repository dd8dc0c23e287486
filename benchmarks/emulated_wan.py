"""A wide-area network on one machine: network namespaces joined by links of a given rate and delay. Linux, root only.

    with Wan(sites=2, rate=100e6, delay_s=0.025) as wan:
        server = subprocess.Popen(wan.command(0, ["my-server", "--bind", wan.address(0)]))
        client = subprocess.Popen(wan.command(1, ["my-client", wan.address(0)]))

Kernels often lack netem, so a process of its own carries the packets from one TUN device a site to the others. Nothing is
left behind, not even after kill -9: the namespaces have no names and go with that process, which ends when its standard
input closes, and with the programs inside.
"""

import contextlib
import ctypes
import fcntl
import json
import os
import random
import select
import socket
import struct
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

DEVICE = "wan0"
QUEUE_S = 0.05
"""What a link holds back, in time at its rate, before it drops: the bandwidth-delay product of a 50 ms round trip."""

SMALL = 200
"""Bytes: below it a packet carries no bulk, and is not lost by chance, as acknowledgements matter little."""

_CLONE_NEWNET = 0x40000000
_TUNSETIFF, _TUNSETOFFLOAD, _TUNSETVNETHDRSZ = 0x400454CA, 0x400454D0, 0x400454D8
_IFF_TUN, _IFF_NO_PI, _IFF_VNET_HDR = 0x1, 0x1000, 0x4000
_TUN_F_CSUM, _TUN_F_TSO4 = 0x1, 0x2
_SIOCSIFFLAGS, _SIOCSIFADDR, _SIOCSIFNETMASK, _SIOCSIFMTU = 0x8914, 0x8916, 0x891C, 0x8922
_IFF_UP_RUNNING = 0x1 | 0x40
_VNET = 10  # bytes of struct virtio_net_hdr before each packet
_TCP = 6


def address(site: int) -> str:
    return f"10.77.0.{site + 1}"


class Wan:
    """Namespaces that see one another, and nothing else.

    rate: of each direction of each link, in bit/s of IP packets; 0 = unlimited. delay_s: one way. congestion: TCP's
    congestion control inside, for instance "cubic" (which must be in the machine's net.ipv4.tcp_allowed_congestion_control);
    None = the machine's own. loss: share of the packets with data that a link drops by chance, full or not. Raises
    RuntimeError where the kernel or the rights do not allow it.
    """

    def __init__(
        self,
        sites: int = 2,
        rate: float = 0.0,
        delay_s: float = 0.0,
        congestion: str | None = None,
        loss: float = 0.0,
    ) -> None:
        self._loss = loss
        self._process = subprocess.Popen(
            [sys.executable, __file__, str(sites), congestion or ""],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            self._namespaces: list[int] = self._answer()
            self.set(rate, delay_s)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> "Wan":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    @property
    def pid(self) -> int:
        """The process that carries the packets."""
        return self._process.pid

    def address(self, site: int) -> str:
        return address(site)

    def command(self, site: int, words: Sequence[str]) -> list[str]:
        """The command line that runs ``words`` inside a site; it replaces itself by them, so its pid is theirs."""
        return ["nsenter", f"--net=/proc/{self.pid}/fd/{self._namespaces[site]}", "--", *words]

    def set(self, rate: float, delay_s: float, up: bool = True) -> None:
        """Change all links. A link that is not ``up`` swallows everything in silence, as a cut fibre does."""
        self._ask({"rate": rate, "delay_s": delay_s, "up": up, "loss": self._loss})

    def carried(self) -> dict[str, dict[str, int]]:
        """By direction ("0>1"): the ``bytes`` (of IP packets) that went over the link, and ``dropped`` packets."""
        return dict(self._ask({}))

    def close(self) -> None:
        for pipe in (self._process.stdin, self._process.stdout, self._process.stderr):
            assert pipe is not None
            with contextlib.suppress(OSError):
                pipe.close()
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _ask(self, order: dict[str, Any]) -> Any:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> Any:
        assert self._process.stdout is not None and self._process.stderr is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the emulated network has ended:\n{self._process.stderr.read()}")
        return json.loads(line)


# ---- the process that carries the packets ----------------------------------------------------------------------------

_libc = ctypes.CDLL(None, use_errno=True)


def _checked(result: int, what: str) -> None:
    if result:
        raise OSError(ctypes.get_errno(), f"{what}: {os.strerror(ctypes.get_errno())}")


@dataclass(slots=True)
class Site:
    namespace: int  # file descriptors
    tun: int


def make_site(number: int, congestion: str) -> Site:
    """A namespace with its loopback and one TUN device up. The calling thread is inside it afterwards."""
    _checked(_libc.unshare(_CLONE_NEWNET), "a new network namespace")
    namespace = os.open("/proc/self/ns/net", os.O_RDONLY)
    tun = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    flags = _IFF_TUN | _IFF_NO_PI | _IFF_VNET_HDR
    fcntl.ioctl(tun, _TUNSETIFF, struct.pack("16sH22x", DEVICE.encode(), flags))
    fcntl.ioctl(tun, _TUNSETVNETHDRSZ, struct.pack("i", _VNET))
    # Segmentation is left to whoever is behind us, so the kernel hands over up to 64 kB at once; see on_wire.
    fcntl.ioctl(tun, _TUNSETOFFLOAD, _TUN_F_CSUM | _TUN_F_TSO4)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:

        def configure(request: int, device: str, value: bytes) -> None:
            fcntl.ioctl(control, request, struct.pack("16s24s", device.encode(), value))

        def internet(text: str) -> bytes:
            return struct.pack("HH4s", socket.AF_INET, 0, socket.inet_aton(text))

        configure(_SIOCSIFFLAGS, "lo", struct.pack("H", _IFF_UP_RUNNING))
        configure(_SIOCSIFADDR, DEVICE, internet(address(number)))
        configure(_SIOCSIFNETMASK, DEVICE, internet("255.255.255.0"))
        configure(_SIOCSIFMTU, DEVICE, struct.pack("i", 1500))
        configure(_SIOCSIFFLAGS, DEVICE, struct.pack("H", _IFF_UP_RUNNING))
    if congestion:
        with open("/proc/sys/net/ipv4/tcp_congestion_control", "w") as setting:
            setting.write(congestion)
    return Site(namespace, tun)


def on_wire(packet: bytes) -> tuple[int, int]:
    """What ``packet`` (as read from the device) is on a wire: bytes, and IP packets, each with headers of its own."""
    size = len(packet) - _VNET
    segment = struct.unpack_from("=H", packet, 4)[0]
    if packet[1] == 0 or segment == 0:  # no segmentation was put off
        return size, 1
    internet = 4 * (packet[_VNET] & 0xF)
    headers = internet + (4 * (packet[_VNET + internet + 12] >> 4) if packet[_VNET + 9] == _TCP else 8)
    count = -(-(size - headers) // segment)
    return size + headers * (count - 1), count


@dataclass(slots=True)
class Link:
    """One direction between two sites: a queue that drops what does not fit, a line of fixed rate, a fixed delay."""

    rate: float = 0.0
    delay_s: float = 0.0
    up: bool = True
    loss: float = 0.0
    bytes: int = 0
    dropped: int = 0
    _free_at: float = 0.0
    _line: deque[tuple[float, bytes]] = field(default_factory=deque)
    _chance: random.Random = field(default_factory=lambda: random.Random(0))

    def put(self, packet: bytes, now: float) -> None:
        begins = max(now, self._free_at)
        size, count = on_wire(packet)
        # What the kernel has handed over at once is lost at once: to TCP one loss, whatever its length.
        lost = self.loss and size > SMALL and self._chance.random() < 1 - (1 - self.loss) ** count
        if not self.up or begins - now > QUEUE_S or lost:
            self.dropped += 1
            return
        self.bytes += size
        self._free_at = begins + (8 * size / self.rate if self.rate else 0.0)
        self._line.append((self._free_at + self.delay_s, packet))

    def arrived(self, now: float) -> Iterator[bytes]:
        while self._line and self._line[0][0] <= now:
            yield self._line.popleft()[1]

    @property
    def next_at(self) -> float:
        return self._line[0][0] if self._line else float("inf")

    def set(self, rate: float, delay_s: float, up: bool, loss: float) -> None:
        self.rate, self.delay_s, self.up, self.loss = rate, delay_s, up, loss
        if not up:  # what is under way is lost as well
            self._line.clear()
            self._free_at = 0.0


def serve(count: int, congestion: str) -> None:
    """Carry packets until standard input ends. One JSON line in, one out; the first says where the namespaces are."""
    home = os.open("/proc/self/ns/net", os.O_RDONLY)
    sites = [make_site(number, congestion) for number in range(count)]
    _checked(_libc.setns(home, _CLONE_NEWNET), "back to our own network namespace")
    with contextlib.suppress(
        OSError
    ):  # on time, however busy the machine is; without the right to it, as good as can be
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    links = {(a, b): Link() for a in range(count) for b in range(count) if a != b}
    say([site.namespace for site in sites])
    while True:
        now = time.monotonic()
        for (_, to), link in links.items():
            for packet in link.arrived(now):
                with contextlib.suppress(OSError):  # the device is full: lost, as at any receiver
                    os.write(sites[to].tun, packet)
        wait = min(link.next_at for link in links.values()) - time.monotonic()
        waiting = [sys.stdin.fileno(), *(site.tun for site in sites)]
        ready, _, _ = select.select(waiting, [], [], min(max(wait, 0.0), 1.0))
        for number, site in enumerate(sites):
            if site.tun in ready:
                take_in(number, site, links)
        if sys.stdin.fileno() in ready:
            line = sys.stdin.readline()
            if not line:
                return
            if order := json.loads(line):
                for link in links.values():
                    link.set(**order)
            say({f"{a}>{b}": {"bytes": k.bytes, "dropped": k.dropped} for (a, b), k in links.items()})


def take_in(number: int, site: Site, links: dict[tuple[int, int], Link]) -> None:
    """Put what the site's kernel has sent onto its links; IPv4 only."""
    for _ in range(64):
        try:
            packet = os.read(site.tun, 1 << 17)
        except BlockingIOError:
            return
        if packet[_VNET] >> 4 == 4:
            link = links.get((number, packet[_VNET + 19] - 1))
            if link is not None:
                link.put(packet, time.monotonic())


def say(what: Any) -> None:
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    serve(int(sys.argv[1]), sys.argv[2])
