"""TorchFT's reconfigurable gloo group on the address that peers dial."""

from typing import Any

import torch
import torch.distributed as dist


def make_group_class(host: str) -> type[Any]:
    """A subclass of ``torchft.process_group.ProcessGroupGloo`` (0.2.0) that listens on ``host``.

    Upstream's listens where GLOO_SOCKET_IFNAME or the host's name lead, which need not be where peers can dial.
    """
    from torchft.process_group import ProcessGroupGloo

    gloo: Any = dist.ProcessGroupGloo  # its options are not typed

    class IslandGroupGloo(ProcessGroupGloo):  # type: ignore[misc]
        def _create_pg(self, store: dist.Store, rank: int, world_size: int) -> dist.ProcessGroup:
            options = gloo._Options()
            options._timeout = self._timeout
            options._devices = [gloo.create_device(hostname=host)]
            group = dist.ProcessGroup(store, rank, world_size)
            group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
            backend = gloo(store, rank, world_size, options)
            group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, backend)
            return group

    return IslandGroupGloo
