"""The proof that the ranks' shards make up each tensor exactly once, and the refusal of layouts where they do not."""

import itertools
import time

import numpy as np
import pytest
import torch
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard

from torchtitan_diloco.island.layout import (
    Box,
    Layout,
    Report,
    UnsupportedLayout,
    distinct,
    refuse_placements,
    tiles,
)


def rows(*boxes: tuple[tuple[int, ...], tuple[int, ...]]) -> np.ndarray:
    """Boxes, each (offset, shape), as the rows that ``tiles`` takes."""
    return np.array([(*offset, *shape) for offset, shape in boxes], dtype=np.int64)


def report(problems: tuple[str, ...] = (), **held: tuple[tuple[int, ...], Box]) -> Report:
    return Report.of({name: (shape, torch.float32, box) for name, (shape, box) in held.items()}, problems)


def covered_once(shape: tuple[int, ...], boxes: np.ndarray) -> bool:
    """The definition, element by element."""
    count = np.zeros(shape, dtype=int)
    for row in boxes:
        offset, extent = row[: len(shape)], row[len(shape) :]
        count[tuple(slice(o, o + e) for o, e in zip(offset, extent, strict=True))] += 1
    return bool((count == 1).all())


def test_quarters_of_a_matrix_tile_it():
    assert tiles((4, 6), rows(((0, 0), (2, 3)), ((0, 3), (2, 3)), ((2, 0), (2, 3)), ((2, 3), (2, 3))))


def test_a_pinwheel_that_no_straight_cut_divides_tiles_its_square():
    wheel = rows(((0, 0), (1, 2)), ((0, 2), (2, 1)), ((2, 1), (1, 2)), ((1, 0), (2, 1)), ((1, 1), (1, 1)))
    assert tiles((3, 3), wheel)
    assert not tiles((3, 3), wheel[:-1])


@pytest.mark.parametrize(
    "boxes",
    [
        pytest.param(rows(((0, 0), (2, 4)), ((1, 0), (3, 4))), id="overlap"),
        pytest.param(rows(((0, 0), (2, 4)), ((3, 0), (1, 4))), id="gap"),
        # Sizes add up to the whole: an overlap makes up for a gap.
        pytest.param(rows(((0, 0), (2, 4)), ((1, 0), (2, 4))), id="overlap and gap"),
        pytest.param(
            rows(((0, 0), (2, 2)), ((0, 2), (2, 2)), ((2, 0), (2, 2)), ((0, 1), (2, 2))), id="shifted"
        ),
        pytest.param(rows(((0, 0), (4, 4)), ((0, 0), (1, 1))), id="a corner twice"),
        pytest.param(rows(((0, 0), (5, 4))), id="beyond the end"),
        pytest.param(rows(((-1, 0), (5, 4))), id="before the start"),
        pytest.param(np.empty((0, 4), dtype=np.int64), id="nobody holds it"),
    ],
)
def test_what_covers_an_element_twice_or_never_does_not_tile(boxes):
    assert not tiles((4, 4), boxes)


def test_tiling_agrees_with_counting_every_element_on_random_boxes():
    rng = np.random.default_rng(0)
    seen = {True: 0, False: 0}
    for _ in range(400):
        shape = tuple(rng.integers(1, 4, size=rng.integers(1, 4)).tolist())
        cuts = [sorted({0, n, *rng.integers(0, n + 1, size=1).tolist()}) for n in shape]
        cells = itertools.product(*(list(itertools.pairwise(c)) for c in cuts))
        boxes = rows(*[(tuple(a for a, _ in cell), tuple(b - a for a, b in cell)) for cell in cells])
        if rng.random() < 0.7:  # spoil it, perhaps
            dim = rng.integers(len(shape))
            boxes[rng.integers(len(boxes)), dim] = rng.integers(shape[dim])
            boxes = boxes[(boxes[:, : len(shape)] + boxes[:, len(shape) :] <= shape).all(axis=1)]
        seen[covered_once(shape, boxes)] += 1
        assert tiles(shape, boxes) == covered_once(shape, boxes)
    assert min(seen.values()) > 50


def test_scalars_and_tensors_without_elements_tile():
    assert tiles((), np.empty((1, 0), dtype=np.int64))
    assert not tiles((), np.empty((0, 0), dtype=np.int64))
    assert tiles((0, 3), np.empty((0, 4), dtype=np.int64))


def test_replicas_and_empty_shards_are_left_out():
    boxes = rows(((0,), (2,)), ((2,), (0,)), ((0,), (2,)), ((2,), (1,)))
    assert distinct(boxes).tolist() == [0, 3]


def test_the_lowest_rank_of_a_replica_sends_and_pipeline_stages_send_their_own():
    first, second = Box((0,), (2,)), Box((2,), (1,))
    layout = Layout.of(
        [
            report(a=((3,), first), scalar=((), Box((), ()))),
            report(a=((3,), second), scalar=((), Box((), ()))),
            report(a=((3,), first), scalar=((), Box((), ()))),
            report(b=((3,), Box((0,), (3,)))),
        ]
    )
    assert layout.problems == ()
    assert [set(names) for names in layout.senders] == [{"a", "scalar"}, {"a"}, set(), {"b"}]
    assert set(layout.specs) == {"a", "b", "scalar"}


def test_a_layout_with_a_hole_names_the_tensor():
    layout = Layout.of([report(a=((3,), Box((0,), (1,)))), report(a=((3,), Box((2,), (1,))))])
    assert layout.problems == ("the shards of a (3,) do not make it up exactly once",)


def test_ranks_that_disagree_about_a_tensor_and_problems_of_single_ranks_are_reported():
    layout = Layout.of(
        [report(a=((3,), Box((0,), (3,)))), report(("b is odd",), a=((3, 1), Box((0, 0), (3, 1))))]
    )
    assert layout.problems == ("b is odd", "a is (3,) on one rank and (3, 1) on another")


def test_a_report_gives_back_its_boxes():
    boxes = {"a": Box((1, 2), (3, 4)), "b": Box((), ()), "c": Box((5,), (6,))}
    held = report(a=((9, 9), boxes["a"]), b=((), boxes["b"]), c=((11,), boxes["c"]))
    assert held.box_table() == boxes


def test_a_thousand_ranks_with_four_hundred_tensors_are_checked_in_a_second_or_two():
    shape, data_parallel, tensor_parallel = (8192, 4096), 128, 8
    height, width = shape[0] // data_parallel, shape[1] // tensor_parallel
    reports = [
        report(**{f"t{i}": (shape, Box((row * height, column * width), (height, width))) for i in range(400)})
        for row in range(data_parallel)
        for column in range(tensor_parallel)
    ]
    began = time.process_time()
    layout = Layout.of(reports)
    assert time.process_time() - began < 2.0
    assert layout.problems == ()
    assert all(len(names) == 400 for names in layout.senders)


def boxes_of(shape, mesh, placements) -> np.ndarray:
    """What torch says each rank of the mesh holds."""
    found = []
    for coordinate in itertools.product(*map(range, mesh)):
        extent, offset = _compute_local_shape_and_global_offset(shape, mesh, list(coordinate), placements)
        found.append((tuple(offset), tuple(extent)))
    return rows(*found)


FSDP_OVER_TP = (_StridedShard(0, split_factor=2), Shard(0))


@pytest.mark.parametrize(
    "shape, mesh, placements",
    [
        pytest.param((8, 3), (2, 2), FSDP_OVER_TP, id="rows by TP, then by FSDP"),
        pytest.param((61, 3), (2, 2), (Shard(0), Shard(1)), id="uneven, but in dimensions of their own"),
        pytest.param((61,), (2, 4), (Shard(0), Replicate()), id="replicas"),
        pytest.param((61,), (3, 2), (Shard(0), Shard(0)), id="left to right"),
        pytest.param((61,), (1, 2), FSDP_OVER_TP, id="a strided shard over one rank"),
    ],
)
def test_supported_placements_tile(shape, mesh, placements):
    refuse_placements(shape, mesh, placements)
    boxes = boxes_of(shape, mesh, placements)
    assert tiles(shape, boxes[distinct(boxes)])


def test_a_strided_shard_that_does_not_split_evenly_is_refused():
    # FSDP splits rows 0-3 and 4-6 of the two TP halves by three; torch gives rank (2, 0) row 6, which (2, 1) holds.
    shape, mesh = (7,), (3, 2)
    boxes = boxes_of(shape, mesh, FSDP_OVER_TP)
    assert boxes[4].tolist() == [6, 1]
    assert tiles(shape, boxes[distinct(boxes)])  # so nothing but the placements gives it away
    with pytest.raises(
        UnsupportedLayout, match="has 7 elements in dimension 0, which 6 ranks cannot share evenly"
    ):
        refuse_placements(shape, mesh, FSDP_OVER_TP)


def test_a_strided_shard_without_its_partner_does_not_tile():
    boxes = boxes_of((8,), (2,), (_StridedShard(0, split_factor=2),))
    assert not tiles((8,), boxes[distinct(boxes)])


def test_a_partial_sum_is_refused():
    with pytest.raises(UnsupportedLayout, match="is placed as"):
        refuse_placements((4,), (2,), (Partial(),))
