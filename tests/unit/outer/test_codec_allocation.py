"""A prepared plan allocates nothing: torch's allocator is watched through its profiler, which sees single bytes."""

from collections.abc import Callable

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from tests.helpers.codecs import WIRES, gaussian, name_of
from torchtitan_diloco.outer.codec import ErrorFeedback, make_codec

NUMEL = 20_001


def allocated(work: Callable[[], object]) -> list[int]:
    """Bytes of every allocation of tensor memory during ``work``, temporaries inside operators included."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as watched:
        work()
    assert watched.profiler is not None and watched.profiler.kineto_results is not None
    events = [e for e in watched.profiler.kineto_results.events() if e.name() == "[memory]"]
    return [e.nbytes() for e in events if e.nbytes() > 0]


def test_the_watch_sees_temporaries_and_even_python_numbers():
    values, out, bits = torch.ones(1000), torch.empty(1000), torch.ones(1000, dtype=torch.int32)
    assert max(allocated(lambda: torch.empty(1000))) == 4000
    # A converted copy that is gone afterwards.
    assert max(allocated(lambda: torch.add(bits, values, out=out))) == 4000
    assert min(allocated(lambda: bits.add_(2))) == 4
    assert allocated(lambda: torch.add(values, values, out=out)) == []


@pytest.mark.parametrize("wire", WIRES, ids=name_of)
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_encoding_and_decoding_allocate_nothing(wire, rounding):
    coder = make_codec(wire.name, block=wire.block, density=wire.density, rounding=rounding)
    plan = coder.prepare(NUMEL, cached_values=8192)
    values, buffer = gaussian(NUMEL), torch.empty(plan.nbytes, dtype=torch.uint8)
    out = torch.empty(NUMEL)
    feedback = ErrorFeedback(plan)

    def everything() -> None:
        plan.encode(values, buffer, 1)
        plan.decode(buffer, out)
        plan.decode_scaled(buffer, 0.5, out)
        plan.decode_add(buffer, 0.5, out)
        plan.weighted_sum([buffer, buffer], [0.5, 0.25], out)
        feedback.propose(values, buffer, 2)
        feedback.commit()

    assert allocated(everything) == []


def test_scratch_does_not_grow_with_the_tensor():
    """Preparing for 50 million values takes as much memory as for one million."""
    for wire in ("int8", "int4", "fp4_e3m0", "topk"):
        coder = make_codec(wire, rounding="stochastic")
        # Both are whole numbers of pieces, so neither has a tail.
        small, large = (sum(allocated(lambda n=n, coder=coder: coder.prepare(n << 18))) for n in (8, 381))
        assert large == small
        assert small < 20 * 2**20
