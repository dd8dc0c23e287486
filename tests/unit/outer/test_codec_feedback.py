"""Error feedback: nothing is lost over slots, and a slot that fails leaves no trace."""

import pytest
import torch

from tests.helpers.codecs import gaussian, heavy_tailed
from torchtitan_diloco.outer.codec import ErrorFeedback, make_codec, noise_seed

CODERS = {
    "fp32": make_codec("fp32"),
    "int8": make_codec("int8"),
    "int4": make_codec("int4"),
    "fp4": make_codec("fp4_e3m0"),
    "fp4 stochastic": make_codec("fp4_e3m0", rounding="stochastic"),
    "topk": make_codec("topk"),
}
NUMEL, SLOTS = 10_000, 30


@pytest.mark.parametrize("name", CODERS)
def test_what_was_decoded_and_the_residual_add_up_to_all_deltas(name):
    plan = CODERS[name].prepare(NUMEL, cached_values=4096)
    feedback = ErrorFeedback(plan)
    buffer, out = torch.empty(plan.nbytes, dtype=torch.uint8), torch.empty(NUMEL)
    sent, given = torch.zeros(NUMEL).double(), torch.zeros(NUMEL).double()
    for slot in range(SLOTS):
        delta = heavy_tailed(NUMEL, slot)
        given += delta
        feedback.propose(delta, buffer, noise_seed("run", slot, 0, 0))
        plan.decode(buffer, out)
        sent += out
        feedback.commit()
    largest = float(given.abs().max())
    assert float((sent + feedback.residual - given).abs().max()) < SLOTS * 2**-22 * largest
    if name == "fp32":
        assert torch.count_nonzero(feedback.residual) == 0


def test_topk_with_feedback_sends_in_time_what_it_would_never_send_without():
    delta = gaussian(4096)
    plan = make_codec("topk", density=1 / 16).prepare(4096)
    feedback = ErrorFeedback(plan)
    buffer, out = torch.empty(plan.nbytes, dtype=torch.uint8), torch.empty(4096)
    with_feedback, without = torch.zeros(4096), torch.zeros(4096)
    for _ in range(200):
        feedback.propose(delta.clone(), buffer)
        plan.decode_add(buffer, 1 / 200, with_feedback)
        feedback.commit()
        plan.encode(delta, buffer)
        plan.decode(buffer, out)
        without += out / 200
    assert float((with_feedback - delta).norm() / delta.norm()) < 0.1
    assert float((without - delta).norm() / delta.norm()) > 0.5


def test_a_failed_slot_leaves_the_residual_to_the_bit():
    plan = make_codec("int4").prepare(NUMEL)
    feedback = ErrorFeedback(plan)
    buffer, again = torch.empty(2, plan.nbytes, dtype=torch.uint8)
    feedback.propose(gaussian(NUMEL, 0), buffer)
    feedback.commit()
    residual = feedback.residual.clone()
    assert torch.count_nonzero(residual) > NUMEL / 2
    feedback.propose(gaussian(NUMEL, 1), buffer)
    assert feedback.is_open and torch.equal(feedback.residual, residual)
    feedback.abandon()
    assert not feedback.is_open and torch.equal(feedback.residual, residual)
    # The same delta again, as if the failed slot had never been.
    feedback.propose(gaussian(NUMEL, 1), again)
    assert torch.equal(buffer, again)
    feedback.abandon()
    feedback.abandon()
    assert torch.equal(feedback.residual, residual)


def test_the_residual_is_what_the_sent_bytes_lost():
    plan = make_codec("fp4_e3m0").prepare(NUMEL)
    carried = gaussian(NUMEL, 9)
    feedback = ErrorFeedback(plan, carried.clone())
    delta, buffer, out = gaussian(NUMEL, 1), torch.empty(plan.nbytes, dtype=torch.uint8), torch.empty(NUMEL)
    total = delta + carried
    feedback.propose(delta, buffer)
    assert torch.equal(feedback.residual, carried)
    plan.decode(buffer, out)
    feedback.commit()
    assert torch.equal(feedback.residual, total - out)


def test_it_restarts_from_a_saved_residual():
    plan = make_codec("int8").prepare(NUMEL)
    first = ErrorFeedback(plan)
    buffers = torch.empty(2, plan.nbytes, dtype=torch.uint8)
    first.propose(gaussian(NUMEL, 0), buffers[0])
    first.commit()
    restarted = ErrorFeedback(plan, first.residual.clone())
    for feedback, buffer in zip((first, restarted), buffers, strict=True):
        feedback.propose(gaussian(NUMEL, 1), buffer)
        feedback.commit()
    assert torch.equal(buffers[0], buffers[1]) and torch.equal(first.residual, restarted.residual)


def test_steps_out_of_order_are_refused_before_anything_changes():
    plan = make_codec("int8", rounding="stochastic").prepare(10)
    feedback = ErrorFeedback(plan, torch.ones(10))
    buffer = torch.empty(plan.nbytes, dtype=torch.uint8)
    with pytest.raises(RuntimeError, match="no open proposal"):
        feedback.commit()
    delta = torch.ones(10)
    with pytest.raises(ValueError, match="seed"):
        feedback.propose(delta, buffer)
    assert torch.equal(delta, torch.ones(10))
    feedback.propose(delta, buffer, 1)
    with pytest.raises(RuntimeError, match="neither"):
        feedback.propose(torch.ones(10), buffer, 1)
    with pytest.raises(ValueError, match="residual"):
        ErrorFeedback(plan, torch.ones(11))
