"""Faults planted in the codecs: the checks that the other tests are made of must see each of them."""

from collections.abc import Callable

import pytest
import torch

from tests.golden.codec_reference import Wire
from tests.helpers.codec_faults import CODEC_FAULTS
from tests.helpers.codecs import awkward, check_wire, gaussian, heavy_tailed
from tests.helpers.faults import Fault, plant
from torchtitan_diloco.outer.codec import ErrorFeedback, make_codec, noise_seed

NUMEL = 20_001


def bytes_and_bits(wire: Wire) -> Callable[[], None]:
    def check() -> None:
        for make in (gaussian, heavy_tailed, awkward):
            check_wire(wire, make(NUMEL))

    return check


def sums() -> None:
    plan = make_codec("int8").prepare(NUMEL, cached_values=8192)
    buffer, out, total = torch.empty(plan.nbytes, dtype=torch.uint8), torch.empty(NUMEL), gaussian(NUMEL, 1)
    plan.encode(gaussian(NUMEL), buffer)
    plan.decode(buffer, out)
    expected = total + out * 0.3
    plan.decode_add(buffer, 0.3, total)
    assert torch.equal(total, expected)


def feedback() -> None:
    plan = make_codec("int4").prepare(NUMEL)
    residual = ErrorFeedback(plan)
    buffer, out = torch.empty(plan.nbytes, dtype=torch.uint8), torch.empty(NUMEL)
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


def fair_noise(wire: str) -> Callable[[], None]:
    def check() -> None:
        values = gaussian(4096).abs()
        plan = make_codec(wire, rounding="stochastic").prepare(4096)
        buffer, total = torch.empty(plan.nbytes, dtype=torch.uint8), torch.zeros(4096)
        for draw in range(50):
            plan.encode(values, buffer, noise_seed("run", draw, 0, 0))
            plan.decode_add(buffer, 1 / 50, total)
        # 200,000 independent roundings: the sum is right to a fraction of a percent.
        assert abs(float(total.sum() / values.sum()) - 1) < 0.005
        assert float((total - values).norm() / values.norm()) < 0.06

    return check


INT8, INT4, FP4 = (bytes_and_bits(Wire(name)) for name in ("int8", "int4", "fp4_e3m0"))

CHECKS = {
    "int8": INT8,
    "int8 at the extremes": INT8,
    "int4": INT4,
    "int4 at the extremes": INT4,
    "fp4": FP4,
    "fp4 at the extremes": FP4,
    "topk": bytes_and_bits(Wire("topk")),
    "pieces": bytes_and_bits(Wire("fp4_e3m0", block=2 * 4095)),
    "sums": sums,
    "feedback": feedback,
    "int8 with noise": fair_noise("int8"),
    "fp4 with noise": fair_noise("fp4_e3m0"),
}


@pytest.mark.parametrize("check", CHECKS)
def test_the_checks_pass_without_a_fault(check: str) -> None:
    CHECKS[check]()


@pytest.mark.parametrize("fault", CODEC_FAULTS, ids=str)
def test_a_planted_fault_is_seen(fault: Fault[str], monkeypatch: pytest.MonkeyPatch) -> None:
    plant(fault, monkeypatch)
    with pytest.raises(AssertionError):
        CHECKS[fault.case]()
