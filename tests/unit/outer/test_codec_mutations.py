"""Faults planted in the codecs: the checks that the other tests are made of must see each of them.

A mutant is a copy of the package under another name with one place changed. A place that is no longer there fails the
test: move the fault, do not drop it.
"""

import importlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest
import torch

from tests.golden.codec_reference import Wire
from tests.helpers.codecs import awkward, check_wire, gaussian, heavy_tailed
from torchtitan_diloco.outer import codec

NUMEL = 20_001
HOME = "torchtitan_diloco.outer.codec"


def bytes_and_bits(wire: Wire) -> Callable[[ModuleType], None]:
    def check(package: ModuleType) -> None:
        for make in (gaussian, heavy_tailed, awkward):
            check_wire(package, wire, make(NUMEL))

    return check


def sums(package: ModuleType) -> None:
    plan = package.make_codec("int8").prepare(NUMEL, cached_values=8192)
    buffer, out, total = torch.empty(plan.nbytes, dtype=torch.uint8), torch.empty(NUMEL), gaussian(NUMEL, 1)
    plan.encode(gaussian(NUMEL), buffer)
    plan.decode(buffer, out)
    expected = total + out * 0.3
    plan.decode_add(buffer, 0.3, total)
    assert torch.equal(total, expected)


def feedback(package: ModuleType) -> None:
    plan = package.make_codec("int4").prepare(NUMEL)
    residual, buffer, out = (
        package.ErrorFeedback(plan),
        torch.empty(plan.nbytes, dtype=torch.uint8),
        torch.empty(NUMEL),
    )
    sent, given = torch.zeros(NUMEL), torch.zeros(NUMEL)
    for slot in range(6):
        delta = gaussian(NUMEL, slot)
        if slot % 2:
            given += delta
        residual.propose(delta, buffer)
        if slot % 2 == 0:
            residual.abandon()
            continue
        plan.decode(buffer, out)
        sent += out
        residual.commit()
    assert torch.allclose(sent + residual.residual, given, atol=1e-8)


def fair_noise(wire: str) -> Callable[[ModuleType], None]:
    def check(package: ModuleType) -> None:
        values = gaussian(4096).abs()
        plan = package.make_codec(wire, rounding="stochastic").prepare(4096)
        buffer, total = torch.empty(plan.nbytes, dtype=torch.uint8), torch.zeros(4096)
        for draw in range(50):
            plan.encode(values, buffer, package.noise_seed("run", draw, 0, 0))
            plan.decode_add(buffer, 1 / 50, total)
        # 200,000 independent roundings: the sum is right to a fraction of a percent.
        assert abs(float(total.sum() / values.sum()) - 1) < 0.005
        assert float((total - values).norm() / values.norm()) < 0.06

    return check


@dataclass(frozen=True)
class Fault:
    name: str
    module: str
    place: str
    instead: str
    check: Callable[[ModuleType], None]


INT8, INT4, FP4, TOPK = (bytes_and_bits(Wire(name)) for name in ("int8", "int4", "fp4_e3m0", "topk"))

FAULTS = [
    Fault("integers cut instead of rounded", "integer", "scaled.round_()", "scaled.trunc_()", INT8),
    Fault("ties away from zero", "integer", "scaled.round_()",
          "scaled.copy_(torch.sign(scaled) * torch.floor(scaled.abs() + 0.5))", INT8),
    Fault("scale rounded to nearest", "integer", ".add_(self._below).bitwise_and_(self._kept)",
          ".add_(0x7FFF).bitwise_and_(self._kept)", INT8),
    Fault("scale not rounded before it is inverted", "integer", ".add_(self._below).bitwise_and_(self._kept)", "", INT8),
    Fault("largest scale forgotten", "integer", "scale.clamp_(max=self._largest_scale)", "scale", INT4),
    Fault("tiny blocks forgotten", "integer", "TINY = 2.0**-100", "TINY = 0.0", INT8),
    Fault("signed maximum", "integer", "torch.abs(values, out=scaled)", "scaled.copy_(values)", INT8),
    Fault("127 levels of int4", "integer", "Quantizer(size, block, 7,", "Quantizer(size, block, 6,", INT4),
    Fault("halves of a byte swapped", "nibbles", "levels[byte & 15], levels[byte >> 4]",
          "levels[byte >> 4], levels[byte & 15]", INT4),
    Fault("sign of int4 not masked", "nibbles", "self._wide.bitwise_and_(self._mask)", "pass", INT4),
    Fault("fp4 ties down", "fp4", "HALF_MANTISSA) - ONE_BITS", "HALF_MANTISSA - 1) - ONE_BITS", FP4),
    Fault("fp4 without rounding to the smallest level", "fp4", "min=1.0", "min=0.0", FP4),
    Fault("fp4 scale cut instead of rounded", "fp4", "else HALF_MANTISSA, device", "else 0, device", FP4),
    Fault("fp4 values above the top level", "fp4", ".clamp_(max=TOP_LEVEL)", "", FP4),
    Fault("fp4 sign lost", "fp4", "torch.copysign(doubled, values, out=doubled)", "pass", FP4),
    Fault("topk by value, not magnitude", "topk", "MAGNITUDE_BITS = 0x7FFFF000", "MAGNITUDE_BITS = -0x1000", TOPK),
    Fault("topk ties to the higher place", "topk", "torch.arange(CHUNK - 1, -1, -1,", "torch.arange(0, CHUNK, 1,", TOPK),
    Fault("topk leaves old values", "topk", "out.zero_().view", "out.view", TOPK),
    Fault("topk packs high bits of a place wrongly", "topk", "low.bitwise_right_shift_(self._eight)",
          "low.bitwise_right_shift_(self._four)", TOPK),
    Fault("sections of the second piece misplaced", "codec", "(b + lo, b + hi)", "(b + lo - lo % 2, b + hi - lo % 2)",
          bytes_and_bits(Wire("fp4_e3m0", block=2 * 4095))),
    Fault("the tail keeps an earlier piece", "codec", "self._padded = torch.zeros(", "self._padded = torch.ones(", INT8),
    Fault("share forgotten", "codec", "decoded.mul_(self._share)", "pass", sums),
    Fault("sum becomes the last term", "codec", "target.add_(decoded", "target.copy_(decoded", sums),
    Fault("residual moves in a failed slot", "feedback", "        self._candidate = delta",
          "        self._candidate = delta\n        self.residual.copy_(delta)", feedback),
    Fault("residual not added", "feedback", "        delta.add_(self.residual)\n", "", feedback),
    Fault("residual never moves", "feedback", "self.residual.copy_(self._candidate)", "pass", feedback),
    Fault("error of the wrong sign", "codec", "torch.sub(part, self._decoded[:count], out=error[here])",
          "torch.sub(self._decoded[:count], part, out=error[here])", feedback),
    Fault("noise always rounds down", "integer", "scaled.add_(uniform).floor_()", "scaled.floor_()", fair_noise("int8")),
    Fault("noise one bit short", "fp4", "Noise(size, 23, device)", "Noise(size, 22, device)", fair_noise("fp4_e3m0")),
    Fault("the same noise in every slot", "noise", 'f"{slot}:{part}', 'f"{part}', fair_noise("fp4_e3m0")),
]  # fmt: skip


def mutated(folder: Path, number: int, fault: Fault, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    name = f"mutant_codec_{number}"
    for path in Path(codec.__file__).parent.glob("*.py"):
        source = path.read_text()
        if path.stem == fault.module:
            assert source.count(fault.place) == 1, f"{path.name} has no single place {fault.place!r}"
            source = source.replace(fault.place, fault.instead)
        target = folder / name / path.name
        target.parent.mkdir(exist_ok=True)
        target.write_text(source.replace(HOME, name))
    monkeypatch.syspath_prepend(str(folder))
    return importlib.import_module(name)


CHECKS = {"int8": INT8, "int4": INT4, "fp4": FP4, "topk": TOPK, "sums": sums, "feedback": feedback,
          "fair int8": fair_noise("int8"), "fair fp4": fair_noise("fp4_e3m0")}  # fmt: skip


@pytest.mark.parametrize("check", CHECKS)
def test_the_checks_pass_without_a_fault(check):
    CHECKS[check](codec)


@pytest.mark.parametrize("number", range(len(FAULTS)), ids=[fault.name for fault in FAULTS])
def test_a_planted_fault_is_seen(number, tmp_path, monkeypatch):
    fault = FAULTS[number]
    package = mutated(tmp_path, number, fault, monkeypatch)
    try:
        with pytest.raises(AssertionError):
            fault.check(package)
    finally:
        for module in [m for m in sys.modules if m.split(".")[0] == package.__name__]:
            del sys.modules[module]
