"""The CPU shim takes effect whenever it is installed, and keeps its hands off where an accelerator is present."""

import math
import sys
import types

import pytest
import torch
from torchtitan.components import metrics
from torchtitan.distributed import parallel_dims
from torchtitan.distributed import utils as dist_utils
from torchtitan.models.common import attention as tt_attention
from torchtitan.models.common import decoder
from torchtitan.tools import utils

from torchtitan_diloco import cpu
from torchtitan_diloco.cpu import device


@pytest.fixture
def loaded_module(monkeypatch):
    """A torchtitan module that bound the upstream names by ``from ... import`` before the shim came."""
    module = types.ModuleType("torchtitan.imported_early")
    vars(module).update(device._UPSTREAM)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return module


def test_modules_that_were_imported_before_are_rebound(loaded_module):
    assert cpu.install() is True
    assert loaded_module.device_type == "cpu"
    assert loaded_module.device_module.device_count() == 1
    assert (
        loaded_module.create_attention_mask
        is decoder.create_attention_mask
        is tt_attention.create_attention_mask
    )
    for module in (utils, metrics, parallel_dims, dist_utils):
        assert module.device_type == "cpu"
    assert metrics.device_module is utils.device_module is dist_utils.device_module


def test_installing_twice_keeps_the_same_objects(loaded_module):
    assert cpu.install() is True
    before = dict(vars(loaded_module))
    assert cpu.install() is True
    assert vars(loaded_module) == before


def test_nothing_is_touched_where_an_accelerator_is_present(loaded_module, monkeypatch):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    before = dict(vars(loaded_module))
    assert cpu.install() is False
    assert vars(loaded_module) == before


def test_modules_of_others_and_other_uses_of_the_names_stay(loaded_module, monkeypatch):
    foreign = types.ModuleType("torchtitan_lookalike")
    vars(foreign).update(device._UPSTREAM)
    monkeypatch.setitem(sys.modules, foreign.__name__, foreign)
    loaded_module.device_type = "meta"
    cpu.install()
    assert foreign.device_module is device._UPSTREAM["device_module"]
    assert loaded_module.device_type == "meta"


def test_memory_statistics_report_the_resident_set_of_this_process():
    cpu.install()
    monitor = metrics.DeviceMemoryMonitor("cpu")
    before = monitor.get_peak_stats().max_active_gib
    ballast = torch.ones(64 * 2**20 // 4)
    after = monitor.get_peak_stats().max_active_gib
    assert after - before == pytest.approx(ballast.nbytes / 2**30, abs=0.02)
    assert 0 < monitor.get_peak_stats().max_reserved_pct < 100


def test_peak_flops_of_a_cpu_cost_no_subprocess_and_make_mfu_zero(monkeypatch):
    cpu.install()
    monkeypatch.setattr(utils.subprocess, "run", lambda *a, **k: pytest.fail("lspci was run"))
    assert utils.get_peak_flops("x86_64 CPU") == math.inf
    assert 1e12 / utils.get_peak_flops("x86_64 CPU") == 0.0
