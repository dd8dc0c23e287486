"""Sockets that listen, with errors that name the setting to change."""

import ipaddress
import socket

from torchtitan_diloco.errors import UserError


def bind(host: str, port: int, setting: str = "") -> socket.socket:
    """A listening TCP socket; port 0: a free one.

    Raises UserError naming the setting (an island's, unless another is given) when address or port cannot be had.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host, port))
        sock.listen(128)
    except OSError as error:
        sock.close()
        setting = setting or (f"island.port = {port}" if port else f"island.advertise = {host}")
        raise UserError(
            f"{setting}: cannot listen on {host}:{port} ({error.strerror}); choose another"
        ) from error
    return sock


def url_of(host: str, port: int, scheme: str = "http") -> str:
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def is_loopback(host: str) -> bool:
    """Whether only this very machine is reached by it."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"
