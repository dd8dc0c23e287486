"""DocSDPA equals attention written out in fp64 under TorchTitan's own document masks, outputs and gradients."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention.flex_attention import and_masks
from torchtitan.models.common.attention import (
    get_causal_mask_mod,
    get_document_mask_mod,
    get_efficient_causal_mask_mod_for_packed_document,
    get_sliding_window_mask_mod,
)
from torchtitan.models.gpt_oss.model import apply_attention_sink_rescale

from torchtitan_diloco.cpu.attention import DocSDPA, create_boolean_mask

OUTPUT_TOLERANCE = 2e-6
GRADIENT_TOLERANCE = 8e-6


def positions_of(rows: list[list[int]]) -> torch.Tensor:
    """(B, L) positions of rows given by their document lengths."""
    return torch.tensor([[p for length in row for p in range(length)] for row in rows])


def torchtitan_mask(positions: torch.Tensor, *more) -> torch.Tensor:
    mods = [get_causal_mask_mod(), get_efficient_causal_mask_mod_for_packed_document(positions), *more]
    B, L = positions.shape
    return create_boolean_mask(and_masks(*mods), B, None, L, L, device="cpu", BLOCK_SIZE=128)


def mask_by_loops(positions: torch.Tensor, window: int | None = None) -> torch.Tensor:
    """The definition, independent of TorchTitan: same document, not later, not further back than the window."""
    B, L = positions.shape
    mask = torch.zeros(B, 1, L, L, dtype=torch.bool)
    for b in range(B):
        start = 0
        for q in range(L):
            start = q if positions[b, q] == 0 else start
            first = start if window is None else max(start, q - window + 1)
            mask[b, 0, q, first : q + 1] = True
    return mask


def reference(q, k, v, mask, scale=None):
    """fp64 attention, head by head, (B, L, N, H); also the log-sum-exp (B, L, N)."""
    heads_per_kv = q.shape[2] // k.shape[2]
    outs, lses = [], []
    for n in range(q.shape[2]):
        qn, kn, vn = q[:, :, n], k[:, :, n // heads_per_kv], v[:, :, n // heads_per_kv]
        scores = torch.einsum("bqh,bkh->bqk", qn, kn) * (q.shape[-1] ** -0.5 if scale is None else scale)
        scores = scores.masked_fill(~mask[:, 0], float("-inf"))
        outs.append(torch.einsum("bqk,bkh->bqh", scores.softmax(-1), vn))
        lses.append(scores.logsumexp(-1))
    return torch.stack(outs, 2), torch.stack(lses, 2)


def draw_qkv(seed, B, L, heads, kv_heads, H, v_H):
    g = torch.Generator().manual_seed(seed)
    shapes = [(B, L, heads, H), (B, L, kv_heads, H), (B, L, kv_heads, v_H)]
    return [torch.randn(s, generator=g, dtype=torch.float64) for s in shapes]


def assert_equal_to_reference(
    positions, *, seed=0, heads=4, kv_heads=2, H=8, v_H=8, scale=None, epilogue=None
):
    qkv64 = [x.requires_grad_() for x in draw_qkv(seed, *positions.shape, heads, kv_heads, H, v_H)]
    qkv32 = [x.detach().float().requires_grad_() for x in qkv64]
    want, lse = reference(*qkv64, mask_by_loops(positions), scale)
    if epilogue is not None:
        want = epilogue(want, lse)
    got = DocSDPA.Config().build()(
        *qkv32,
        attention_masks=torchtitan_mask(positions),
        scale=scale,
        enable_gqa=heads != kv_heads,
        out_transform=epilogue,
    )
    assert got.shape == (*positions.shape, heads, v_H)
    torch.testing.assert_close(got.double(), want, rtol=OUTPUT_TOLERANCE, atol=OUTPUT_TOLERANCE)
    upstream = torch.randn(want.shape, generator=torch.Generator().manual_seed(seed + 1), dtype=torch.float64)
    want.backward(upstream)
    got.backward(upstream.float())
    for x32, x64 in zip(qkv32, qkv64, strict=True):
        torch.testing.assert_close(
            x32.grad.double(), x64.grad, rtol=GRADIENT_TOLERANCE, atol=GRADIENT_TOLERANCE
        )


@st.composite
def packings(draw):
    """1 to 3 rows of one length, each cut into documents of 1 token or more."""
    length = draw(st.integers(1, 24))
    rows = []
    for _ in range(draw(st.integers(1, 3))):
        cuts = sorted(draw(st.sets(st.integers(1, length - 1)))) if length > 1 else []
        bounds = [0, *cuts, length]
        rows.append([b - a for a, b in itertools.pairwise(bounds)])
    return rows


@settings(max_examples=60, deadline=None)
@given(
    rows=packings(),
    seed=st.integers(0, 2**16),
    heads=st.sampled_from([(4, 4), (4, 2), (6, 2), (3, 1), (1, 1)]),
    H=st.sampled_from([2, 8]),
)
def test_equals_dense_fp64_on_any_packing(rows, seed, heads, H):
    assert_equal_to_reference(positions_of(rows), seed=seed, heads=heads[0], kv_heads=heads[1], H=H, v_H=H)


@settings(max_examples=100, deadline=None)
@given(rows=packings())
def test_three_definitions_of_the_document_mask_agree(rows):
    positions = positions_of(rows)
    B, L = positions.shape
    by_id = create_boolean_mask(
        and_masks(get_causal_mask_mod(), get_document_mask_mod(positions)), B, None, L, L
    )
    assert torch.equal(torchtitan_mask(positions), mask_by_loops(positions))
    assert torch.equal(by_id, mask_by_loops(positions))


@pytest.mark.parametrize("B", [1, 2, 3])
def test_rows_of_one_token_documents_return_their_values(B):
    positions = torch.zeros(B, 5, dtype=torch.int64)
    q, k, v = (x.float() for x in draw_qkv(0, B, 5, 2, 2, 4, 4))
    out = DocSDPA.Config().build()(q, k, v, attention_masks=torchtitan_mask(positions))
    torch.testing.assert_close(out, v)


def test_own_scale_and_value_head_size_of_latent_attention():
    assert_equal_to_reference(positions_of([[7, 1, 9], [17]]), heads=4, kv_heads=4, H=12, v_H=8, scale=0.37)


@pytest.mark.parametrize("heads,kv_heads", [(4, 4), (6, 2)])
def test_attention_sinks_get_the_log_sum_exp(heads, kv_heads):
    sinks = torch.linspace(-2, 2, heads, dtype=torch.float64)

    def epilogue(out, lse):
        return apply_attention_sink_rescale(out, lse, sinks.to(lse.dtype))

    assert_equal_to_reference(
        positions_of([[3, 1, 8], [12]]), heads=heads, kv_heads=kv_heads, epilogue=epilogue
    )


def test_dense_path_and_sdpa_agree_in_bf16():
    positions = positions_of([[3, 1, 8]])
    q, k, v = (x.bfloat16() for x in draw_qkv(0, 1, 12, 4, 2, 8, 8))
    attention, mask = DocSDPA.Config().build(), torchtitan_mask(positions)
    sdpa = attention(q, k, v, attention_masks=mask, enable_gqa=True)
    dense = attention(q, k, v, attention_masks=mask, enable_gqa=True, out_transform=lambda out, lse: out)
    assert dense.dtype == torch.bfloat16
    torch.testing.assert_close(sdpa, dense, rtol=2e-2, atol=2e-2)


def test_sliding_window_mask_is_honoured():
    positions = positions_of([[5, 1, 10]])
    mask = torchtitan_mask(positions, get_sliding_window_mask_mod(3))
    assert torch.equal(mask, mask_by_loops(positions, window=3))


def test_a_token_of_another_document_has_no_influence():
    positions = positions_of([[6, 6]])
    q, k, v = (x.float() for x in draw_qkv(0, 1, 12, 2, 2, 4, 4))
    attention, mask = DocSDPA.Config().build(), torchtitan_mask(positions)
    before = attention(q, k, v, attention_masks=mask)
    k[:, :6] += 1.0
    v[:, :6] += 1.0
    after = attention(q, k, v, attention_masks=mask)
    assert torch.equal(before[:, 6:], after[:, 6:])
    assert not torch.equal(before[:, :6], after[:, :6])


@pytest.mark.parametrize("mask", [None, torch.zeros(1, 1, 4, 4)])
def test_missing_or_unfit_mask_is_refused_rather_than_ignored(mask):
    q = torch.zeros(1, 4, 1, 2)
    with pytest.raises(TypeError, match="install"):
        DocSDPA.Config().build()(q, q, q, attention_masks=mask)


def test_score_mod_is_refused():
    q = torch.zeros(1, 4, 1, 2)
    with pytest.raises(NotImplementedError, match="score_mod"):
        DocSDPA.Config().build()(
            q, q, q, attention_masks=torch.ones(1, 1, 4, 4, dtype=torch.bool), score_mod=lambda *a: a[0]
        )
