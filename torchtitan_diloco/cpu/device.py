"""Tells TorchTitan that its device is the CPU, also when its modules have been imported before.

TorchTitan picks its device type once, at import, and falls back to "cuda" where it finds no accelerator.
"""

import functools
import math
import os
import platform
import sys
from types import SimpleNamespace
from typing import Any

import psutil
import torch
from torchtitan.models.common import attention as tt_attention
from torchtitan.tools import utils as tt_utils

from torchtitan_diloco.cpu.attention import create_boolean_mask

# What TorchTitan bound at its own import; modules that hold these very objects are the ones to rebind.
_UPSTREAM: dict[str, Any] = {
    "device_type": tt_utils.device_type,
    "device_module": tt_utils.device_module,
    "get_peak_flops": tt_utils.get_peak_flops,
    "create_attention_mask": tt_attention.create_attention_mask,
}


class CpuDeviceModule:
    """The part of the ``torch.cuda`` interface that TorchTitan 0.3 calls, answered for the host CPU.

    Everything not defined here is looked up in ``torch.cpu``. ``device_count`` is 1, so each rank uses ``cpu:0``.
    """

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cpu, name)

    def get_device_name(self, device: Any = None) -> str:
        """Human-readable name for the log."""
        return f"{platform.machine()} CPU, {len(os.sched_getaffinity(0))} cores"

    def get_device_properties(self, device: Any = None) -> SimpleNamespace:
        """``total_memory``: host memory in bytes."""
        return SimpleNamespace(total_memory=psutil.virtual_memory().total, name=self.get_device_name())

    def memory_stats(self, device: Any = None) -> dict[str, int]:
        """Resident set size of this process in bytes, now: the kernel's own peak cannot be reset per log window."""
        rss = psutil.Process().memory_info().rss
        return {
            "active_bytes.all.peak": rss,
            "reserved_bytes.all.peak": rss,
            "num_alloc_retries": 0,
            "num_ooms": 0,
        }

    def reset_peak_memory_stats(self, device: Any = None) -> None:
        """Nothing to reset, see :meth:`memory_stats`."""

    def empty_cache(self) -> None:
        """The host allocator keeps no cache of ours."""

    def set_device(self, device: Any) -> None:
        """There is one CPU device."""

    def current_device(self) -> int:
        """Always 0."""
        return 0

    def device_count(self) -> int:
        """Always 1, whatever the local rank."""
        return 1


def accelerator_present() -> bool:
    """Whether torch sees an accelerator (hide it with ``CUDA_VISIBLE_DEVICES=""`` to train on the CPU)."""
    return torch.accelerator.is_available()


def unknown_peak_flops(device_name: str) -> float:
    """Peak FLOP/s of a CPU: unknown, hence infinite, so that MFU reads 0 %.

    The upstream function runs ``lspci`` twice per process, warns where it is missing and then assumes an A100.
    """
    return math.inf


def install() -> bool:
    """Make TorchTitan use the CPU in this process; may be called at any time before the trainer is built.

    Rebinds the names of ``_UPSTREAM`` in every loaded ``torchtitan.*`` module; modules imported later find the new
    objects by themselves. Calling it again is harmless.

    Returns:
        True if TorchTitan uses the CPU from now on, False (and nothing is touched) where an accelerator is present.
    """
    if accelerator_present():
        return False
    for name, module in list(sys.modules.items()):
        if name == "torchtitan" or name.startswith("torchtitan."):
            _rebind(vars(module))
    return True


@functools.cache
def _replacements() -> dict[str, Any]:
    return {
        "device_type": "cpu",
        "device_module": CpuDeviceModule(),
        "get_peak_flops": unknown_peak_flops,
        "create_attention_mask": create_boolean_mask,
    }


def _rebind(namespace: dict[str, Any]) -> None:
    # By identity: a module may use one of these names for something else. vars() does not wake lazy modules.
    for name, upstream in _UPSTREAM.items():
        if namespace.get(name) is upstream:
            namespace[name] = _replacements()[name]
