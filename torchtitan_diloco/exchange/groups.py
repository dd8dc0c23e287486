"""TorchFT's reconfigurable gloo group on the address that peers dial."""

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist


def make_group_class(host: str) -> type[Any]:
    """A subclass of ``torchft.process_group.ProcessGroupGloo`` (0.2.0) that listens on ``host``.

    Upstream's listens where GLOO_SOCKET_IFNAME or the host's name lead, which need not be where peers can dial.
    """
    from torchft.process_group import ProcessGroupGloo

    class IslandGroupGloo(ProcessGroupGloo):  # type: ignore[misc]
        def _create_pg(self, store: dist.Store, rank: int, world_size: int) -> dist.ProcessGroup:
            return group_on(host, store, rank, world_size, self._timeout)

    return IslandGroupGloo


def group_on(host: str, store: dist.Store, rank: int, size: int, timeout: timedelta) -> dist.ProcessGroup:
    """A gloo group whose member here listens on ``host``: what ``_create_pg`` of a ``ProcessGroupGloo`` is to return."""
    gloo: Any = dist.ProcessGroupGloo  # its options are not typed
    options = gloo._Options()
    options._timeout = timeout
    options._devices = [gloo.create_device(hostname=host)]
    group = dist.ProcessGroup(store, rank, size)
    group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
    group._register_backend(
        torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, gloo(store, rank, size, options)
    )
    return group
