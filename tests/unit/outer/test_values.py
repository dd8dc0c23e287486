"""Values that are read piece by piece, and what is made of them while they are read."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from torchtitan_diloco.config.own import CodecConfig, MergeConfig
from torchtitan_diloco.outer.codec import SlicedPlan, make_codec
from torchtitan_diloco.outer.delta import PseudoGradient
from torchtitan_diloco.outer.fragments import Fragment, Piece, TensorSpec
from torchtitan_diloco.outer.pieces import PIECE
from torchtitan_diloco.outer.values import Flat, Strung, whole
from torchtitan_diloco.semi_sync.wire import Wire

LONG = 2 * PIECE + 12_345


def randn(numel: int, seed: int) -> torch.Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed))


def fragment_of(*parts: tuple[int, torch.dtype]) -> Fragment:
    pieces, offset = [], 0
    for i, (numel, dtype) in enumerate(parts):
        pieces.append(Piece(TensorSpec(f"w{i}", (numel,), dtype), offset, 0, numel))
        offset += numel
    return Fragment(0, tuple(pieces))


@given(st.lists(st.integers(0, 9), min_size=1, max_size=6), st.data())
def test_tensors_strung_together_read_as_one(lengths: list[int], data: st.DataObject):
    tensors = [randn(n, i) for i, n in enumerate(lengths)]
    one, strung = torch.cat(tensors), Strung(tensors)
    assert strung.numel == one.numel() and torch.equal(whole(strung), one)
    start = data.draw(st.integers(0, one.numel()))
    stop = data.draw(st.integers(start, one.numel()))
    out = torch.full((stop - start,), torch.nan)
    strung.read(slice(start, stop), out)
    assert torch.equal(out, one[start:stop])


def test_lower_precisions_are_read_as_float32():
    tensors = [randn(5, 1).bfloat16(), randn(3, 2), randn(4, 3).half()]
    assert torch.equal(whole(Strung(tensors)), torch.cat([t.float() for t in tensors]))


def test_whole_uses_the_spare_memory_if_there_is_some():
    flat = randn(LONG, 1)
    assert whole(Flat(flat)).data_ptr() == flat.data_ptr()
    strung = whole(Strung([flat]))
    assert strung.data_ptr() != flat.data_ptr() and torch.equal(strung, flat)


@pytest.mark.parametrize("spare", [False, True])
def test_delta_counts_from_the_rounded_anchor_where_the_island_trains_in_bfloat16(spare: bool):
    sizes = (PIECE + 7, PIECE, 5)
    fragment = fragment_of((sizes[0], torch.float32), (sizes[1], torch.bfloat16), (sizes[2], torch.float32))
    anchor, local = randn(sum(sizes), 1), randn(sum(sizes), 2)
    low = fragment.pieces[1].slice
    local[low] = local[low].bfloat16().float()
    expected, kept = anchor - local, anchor.clone()
    expected[low] = anchor[low].bfloat16().float() - local[low]
    parts = [local[p.slice] for p in fragment.pieces]
    delta = PseudoGradient(fragment, anchor, Flat(local.clone()) if spare else Strung(parts))
    assert torch.equal(whole(delta), expected) and delta.finite
    assert torch.equal(anchor, kept)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("at", [0, PIECE, LONG - 1])
def test_one_number_that_is_not_finite_is_seen(value: float, at: int):
    local = randn(LONG, 2)
    local[at] = value
    delta = PseudoGradient(fragment_of((LONG, torch.float32)), randn(LONG, 1), Strung([local]))
    whole(delta)
    assert not delta.finite


@pytest.mark.parametrize("slices", [[(0, LONG)], [(0, 12_800), (12_800, 300_032), (300_032, LONG)]], ids=len)
@pytest.mark.parametrize("name", ["fp32", "bf16", "int8", "int4", "fp4_e3m0", "topk"])
def test_encoding_what_is_read_gives_the_bytes_of_encoding_the_tensor(
    name: str, slices: list[tuple[int, int]]
):
    values = randn(LONG, 1)
    parts = [values[:1000], values[1000 : PIECE + 3], values[PIECE + 3 :]]
    plan = SlicedPlan(make_codec(name), slices)
    expected, found = torch.zeros(2, plan.nbytes, dtype=torch.uint8)
    plan.encode(values, expected, seed=3)
    plan.encode(Strung(parts), found, seed=3)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("wire", ["fp32", "int8"])
@pytest.mark.parametrize("feedback", [False, True])
def test_wire_leaves_the_parameters_as_they_are(wire: str, feedback: bool):
    fragment = fragment_of((LONG, torch.float32))
    local, anchor = randn(LONG, 1), randn(LONG, 2)
    kept = local.clone()
    out = Wire(CodecConfig(wire=wire, error_feedback=feedback), MergeConfig(), [fragment], "run", 0)
    payload = out.encode(0, 0, PseudoGradient(fragment, anchor, Strung([local])))
    assert torch.equal(local, kept)
    decoded = out.merge.decode(0, payload).delta
    assert (decoded - (anchor - local)).abs().max() < 0.05


def test_a_delta_that_is_not_finite_leaves_the_residual_alone():
    fragment = fragment_of((LONG, torch.float32))
    wire = Wire(CodecConfig(wire="int8", error_feedback=True), MergeConfig(), [fragment], "run", 0)
    delta = PseudoGradient(fragment, torch.full((LONG,), torch.inf), Strung([randn(LONG, 1)]))
    wire.encode(0, 0, delta)
    wire.settle(0, 0, committed=True, counted=False)
    assert not delta.finite and not wire.residuals()["residual.0"].any()
