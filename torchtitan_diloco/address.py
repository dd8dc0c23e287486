"""The address that an island tells its peers to dial: never a guess from the host's name, never one they cannot reach."""

import ipaddress
import logging
import socket
from collections.abc import Iterable
from typing import Any
from urllib.parse import urlsplit

import psutil

from torchtitan_diloco.errors import UserError

logger = logging.getLogger(__name__)


def advertised(setting: str, lighthouse: str) -> str:
    """What ``island.advertise`` means on this machine: an address as it is, the address of an interface, or, where it is
    empty, the one from which the Lighthouse is reached.

    Raises UserError where the setting is none of these, or a loopback address though the Lighthouse is on another machine.
    """
    if not setting:
        return route_to(lighthouse)
    if setting[0] in "^=!" or "," in setting:
        raise UserError(
            f"island.advertise = {setting}: that is NCCL's way to choose among interfaces; name one interface, or an address"
        )
    interfaces = psutil.net_if_addrs()
    host = _address_of(setting, interfaces[setting]) if setting in interfaces else setting
    try:
        addresses = {str(entry[4][0]) for entry in socket.getaddrinfo(host, None)}
    except OSError as error:
        known = ", ".join(sorted(interfaces))
        raise UserError(
            f"island.advertise = {setting}: neither an interface of this machine ({known}) nor a name that resolves here "
            f"({error}); give an address that peers can dial"
        ) from error
    if all(_is_loopback(address) for address in addresses):
        _require_one_host(f"island.advertise = {setting}", lighthouse)
    return host


def _address_of(name: str, found: Iterable[Any]) -> str:
    """IPv4 before IPv6, and no link-local address, which means nothing on another machine."""
    for family in (socket.AF_INET, socket.AF_INET6):
        for entry in found:
            if entry.family == family and not ipaddress.ip_address(entry.address.split("%")[0]).is_link_local:
                return str(entry.address)
    raise UserError(f"island.advertise = {name}: this interface has no address that peers could dial")


def _require_one_host(setting: str, lighthouse: str) -> None:
    host = urlsplit(lighthouse if "//" in lighthouse else f"http://{lighthouse}").hostname or ""
    try:
        local = all(_is_loopback(str(entry[4][0])) for entry in socket.getaddrinfo(host, None))
    except OSError:
        local = False
    if not local:
        raise UserError(
            f"{setting}: peers on other machines would dial themselves, and the Lighthouse ({lighthouse}) is on another one; "
            "give the address or the interface by which they reach this machine"
        )


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.split("%")[0]).is_loopback


def route_to(address: str) -> str:
    """The local address from which ``address`` (a URL) is reached; no packet is sent."""
    parts = urlsplit(address if "//" in address else f"http://{address}")
    if not parts.hostname or not parts.port:
        raise UserError(f"lighthouse.address = {address}: write it as http://HOST:PORT")
    try:
        family, kind, proto, _, where = socket.getaddrinfo(
            parts.hostname, parts.port, type=socket.SOCK_DGRAM
        )[0]
        with socket.socket(family, kind, proto) as probe:
            probe.connect(where)
            return str(probe.getsockname()[0])
    except OSError as error:
        raise UserError(
            f"lighthouse.address = {address}: {parts.hostname} cannot be reached ({error})"
        ) from error
