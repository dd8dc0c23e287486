"""Faults planted in the codecs, error feedback and their use: the golden comparison of whole runs must see each of them."""

from pathlib import Path

import pytest

from tests.golden.codec_runs import SHORT, WIDE, with_a_heal, with_a_listener, with_failures
from tests.golden.compare import Mismatch
from tests.golden.island import Case
from tests.golden.memory_run import MemoryRun
from tests.golden.turns import Stuck
from tests.helpers.codec_faults import CODEC_FAULTS
from tests.helpers.faults import Fault, plant
from torchtitan_diloco.outer.codec import codec
from torchtitan_diloco.semi_sync import diloco, wire

RUNS = {
    **{
        name: MemoryRun(Case(wire=codec, fragments=2), SHORT)
        for name, codec in {"int8": "int8", "int4": "int4", "fp4": "fp4_e3m0"}.items()
    },
    "topk": MemoryRun(Case(wire="topk", feedback=True), WIDE),
    "sums": MemoryRun(Case(wire="int8"), WIDE),
    "int8 with noise": MemoryRun(Case(wire="int8", rounding="stochastic", fragments=2), SHORT),
    "fp4 with noise": MemoryRun(Case(wire="fp4_e3m0", rounding="stochastic", fragments=2), SHORT),
    "feedback": with_failures(Case(wire="int4", feedback=True, fragments=4, overlap=1)),
    "heal": with_a_heal(Case(wire="int4", feedback=True, fragments=4)),
    "listener": with_a_listener(Case(wire="int4", feedback=True, fragments=4, overlap=1, alpha=0.5)),
    "block": MemoryRun(Case(wire="int8", block=6), SHORT),
}
"""By what shows a fault. Those that need values no training makes are planted in tests/unit/outer only."""

USE = [
    Fault("encoded without the residual", wire, "self._feedback[fragment].propose(whole(delta), buffer, seed)",
          "self._encoders[fragment].encode(delta, buffer, seed)", "feedback"),
    Fault("residual moves whatever becomes of the slot", wire, "            if counted:", "            if True:", "feedback"),
    Fault("residual never settled", wire, "            if counted:", "            if False:", "feedback"),
    Fault("residual of another fragment moves", wire, "self._feedback[fragment].commit()",
          "self._feedback[fragment].commit(); self._feedback[fragment - 1].residual.zero_()", "feedback"),
    Fault("residual of a listener moves", diloco, "and self.setup.island in outcome.participants", "", "listener"),
    Fault("residual of one who contributes stays", diloco, "self.setup.island in outcome.participants",
          "self.setup.island not in outcome.participants", "feedback"),
    Fault("residual survives a heal", wire, "self._feedback[fragment].residual.zero_()", "pass", "heal"),
    Fault("all residuals forgotten at a heal", wire, "self._feedback[fragment].residual.zero_()",
          "[f.residual.zero_() for f in self._feedback]", "heal"),
    Fault("noise of another island", wire, "slot, fragment, self._island)", "slot, fragment, 0)", "int8 with noise"),
    Fault("noise of another fragment", wire, "slot, fragment, self._island)", "slot, 0, self._island)", "fp4 with noise"),
    Fault("noise of another slot", wire, "slot, fragment, self._island)", "slot + 1, fragment, self._island)",
          "int8 with noise"),
    Fault("noise of another run", wire, "noise_seed(self._run_id,", "noise_seed('',", "int8 with noise"),
    Fault("block of the settings not used", wire, "block=config.block", "block=None", "block"),
    Fault("rounding of the settings not used", wire, "rounding=config.rounding", "rounding=\"nearest\"", "int8 with noise"),
    Fault("weighted and added with one rounding less", codec,
          "            decoded.mul_(self._share)\n        if add:\n            target.add_(decoded[:count])",
          "            add or decoded.mul_(self._share)\n        if add:\n"
          "            target.add_(decoded[:count], alpha=share)",
          "sums"),
]  # fmt: skip

FAULTS = [fault for fault in CODEC_FAULTS if fault.case in RUNS] + USE


@pytest.mark.parametrize("run", RUNS)
def test_without_a_fault_the_comparison_passes(run: str, tmp_path: Path) -> None:
    assert len(RUNS[run].check(tmp_path)) >= 2


@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_a_planted_fault_is_seen(fault: Fault[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(fault, monkeypatch)
    with pytest.raises((Mismatch, Stuck)):
        RUNS[fault.case].check(tmp_path)
