"""TorchFT's reconfigurable gloo group on the address that peers dial."""

from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from torchtitan_diloco.exchange.links import Links


def make_group_class(host: str) -> type[Any]:
    """A subclass of ``torchft.process_group.ProcessGroupGloo`` (0.2.0) that listens on ``host``.

    Upstream's listens where GLOO_SOCKET_IFNAME or the host's name lead, which need not be where peers can dial. Its
    operations can be ended by ``cut``.
    """
    from torchft.process_group import ProcessGroupGloo

    class IslandGroupGloo(ProcessGroupGloo):  # type: ignore[misc]
        def __init__(self, timeout: timedelta) -> None:
            super().__init__(timeout=timeout)
            self._links = Links()

        def _create_pg(self, store: dist.Store, rank: int, world_size: int) -> dist.ProcessGroup:
            self._links = links = Links()
            return group_on(host, store, rank, world_size, self._timeout, links)

        def cut(self) -> int:
            """Shut its connections down, so that whatever waits for a peer fails now. Returns how many there were."""
            return self._links.cut()

    return IslandGroupGloo


def group_on(
    host: str, store: dist.Store, rank: int, size: int, timeout: timedelta, links: Links | None = None
) -> dist.ProcessGroup:
    """A gloo group whose member here listens on ``host``: what ``_create_pg`` of a ``ProcessGroupGloo`` is to return.

    links: gets to know its connections; then all members have to give theirs.
    """
    gloo: Any = dist.ProcessGroupGloo  # its options are not typed
    options = gloo._Options()
    options._timeout = timeout
    make = partial(gloo.create_device, hostname=host)
    options._devices = [links.listen(make) if links else make()]
    if links:
        links.tell(store, rank)
    group = dist.ProcessGroup(store, rank, size)
    group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
    group._register_backend(
        torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, gloo(store, rank, size, options)
    )
    if links:
        links.learn(store, size)
    return group
