"""A connection that is really made, or why not, in words that say whose fault it is."""

import socket
import time
from pathlib import Path

CONNECT_S = 2.5
ANSWER_S = 2.5
Place = tuple[str, int]


def connect(place: Place, until: float) -> socket.socket:
    """Raises OSError. It takes CONNECT_S at most, and not longer than until ``until``."""
    seconds = max(0.1, min(CONNECT_S, until - time.monotonic()))
    sock = socket.create_connection(place, timeout=seconds)
    sock.settimeout(ANSWER_S)
    return sock


def why(error: BaseException) -> str:
    """A failed try, in words."""
    if isinstance(error, TimeoutError):
        return "no answer: something on the way drops it"
    if isinstance(error, ConnectionRefusedError):
        return "refused: the machine is there, and nothing listens at that port"
    if isinstance(error, socket.gaierror):
        return "the name does not resolve here"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror.lower()
    return str(error) or type(error).__name__


def written(place: Place) -> str:
    host, port = place
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def ephemeral() -> str:
    """The ports of which this machine takes a free one."""
    try:
        low, high = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()
    except (OSError, ValueError):
        return "1024-65535"
    return f"{low}-{high}"
