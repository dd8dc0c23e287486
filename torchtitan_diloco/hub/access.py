"""The hub's door: who is let in, and to what."""

import hmac
import ipaddress
import logging
import time
from collections.abc import Callable, Mapping

from torchtitan_diloco.errors import UserError
from torchtitan_diloco.hub.refusal import Busy, Refusal
from torchtitan_diloco.hub.tokens import OPERATOR, READER, digest
from torchtitan_diloco.listening import is_loopback

logger = logging.getLogger(__name__)

FAILURES = 10  # wrong tokens from one address within WINDOW_S, after which it has to wait
WINDOW_S = 60.0
PEERS = 4096  # addresses that are remembered for it

ISLANDS: frozenset[str] = frozenset()
"""Of a request that is one island's: only the one whose number it carries."""
SPOOL = "spool"
"""In the place of an address: who can write into a spool's folder is an island of that site."""
READERS = frozenset({READER, OPERATOR})
OPERATORS = frozenset({OPERATOR})


class Access:
    """tokens: name -> digest, as ``tokens.read_tokens`` gives them; none: all who reach the hub may do everything."""

    def __init__(
        self, tokens: Mapping[str, bytes] | None = None, now: Callable[[], float] = time.monotonic
    ) -> None:
        self._tokens, self._now = tokens, now
        self._failures: dict[str, list[float]] = {}

    def require_loopback(self, host: str) -> None:
        """Raises UserError where strangers could reach a hub that asks nobody who they are."""
        if self._tokens is None and not is_loopback(host):
            raise UserError(
                f"syncer.bind = {host}: beyond loopback a hub needs syncer.tokens, since whoever reaches it could read and "
                "change the run; set syncer.tokens, or bind 127.0.0.1 and let islands come through `ssh -L`"
            )

    def check(self, who: frozenset[str], island: str | None, authorization: str | None, peer: str) -> None:
        """who: may make this request, by name. island: the number in an island's request. peer: the address it is from.

        Raises Refusal; Busy without a look at the token where too many from that address were wrong.
        """
        if self._tokens is None or (peer == SPOOL and not who):
            return
        source = _network(peer)
        recent = [at for at in self._failures.get(source, ()) if self._now() - at < WINDOW_S]
        if len(recent) >= FAILURES:
            raise Busy(f"too many wrong tokens from {source}", WINDOW_S - (self._now() - recent[0]))
        scheme, _, token = (authorization or "").partition(" ")
        if scheme.lower() != "bearer" or not token:
            raise Refusal("forbidden", "this hub asks for a token, and none came")
        name = self._name(token.strip())
        if name is None:
            self._failures[source] = [*recent, self._now()]
            self._tidy()
            logger.warning("a wrong token from %s", source)
            raise Refusal("forbidden", "the hub does not know this token")
        if name not in (who or {f"island-{island}"}):
            asked = f"act as island {island}" if not who else f"do what is for {' and '.join(sorted(who))}"
            raise Refusal("forbidden", f"this is the token of {name}, who may not {asked}")

    def _name(self, token: str) -> str | None:
        given, found = digest(token), None
        assert self._tokens is not None
        for name, known in self._tokens.items():  # all of them, so that the time says nothing
            if hmac.compare_digest(given, known):
                found = name
        return found

    def _tidy(self) -> None:
        if len(self._failures) > PEERS:
            latest = sorted(self._failures.items(), key=lambda entry: entry[1][-1])
            self._failures = dict(latest[-PEERS // 2 :])


def _network(peer: str) -> str:
    """An IPv6 host has 2^64 addresses of its own."""
    try:
        address = ipaddress.ip_address(peer)
    except ValueError:
        return peer
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is None:
        return str(ipaddress.ip_network((address, 64), strict=False))
    return peer
