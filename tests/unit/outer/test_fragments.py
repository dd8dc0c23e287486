"""Every exchanged tensor in exactly one fragment, whatever the partition; sizes; and what is refused."""

import math
import random
from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torchtitan_diloco.outer.fragments import (
    Fragment,
    TensorSpec,
    balanced,
    by_layer,
    by_modules,
    fingerprint,
    whole_model,
)

Specs = list[TensorSpec]

SHAPES = st.lists(st.integers(0, 9), max_size=3).map(tuple)
NAMES = st.lists(
    st.one_of(
        st.builds(
            "layers.{}.{}".format, st.integers(0, 11), st.sampled_from(["wq.weight", "norm.weight", "w1"])
        ),
        st.sampled_from(["tok_embeddings.weight", "norm.weight", "lm_head.weight", "rope.scale"]),
    ),
    unique=True,
    min_size=1,
    max_size=20,
)


@st.composite
def models(draw: st.DrawFn) -> Specs:
    return [TensorSpec(name, draw(SHAPES), torch.float32) for name in draw(NAMES)]


@st.composite
def large_models(draw: st.DrawFn) -> Specs:
    """Shapes as models have them: matrices of many rows, vectors, and an embedding larger than all the rest."""
    width = draw(st.integers(1, 64))
    heights = draw(st.lists(st.integers(1, 300), min_size=1, max_size=12))
    specs = [TensorSpec(f"layers.{i}.w", (height, width), torch.float32) for i, height in enumerate(heights)]
    vectors = draw(st.integers(0, 5))
    specs += [TensorSpec(f"layers.{i}.norm", (width,), torch.float32) for i in range(vectors)]
    return [*specs, TensorSpec("tok_embeddings.weight", (draw(st.integers(1, 5000)), width), torch.float32)]


def check(specs: Specs, fragments: Sequence[Fragment], count: int) -> None:
    """Every element once; offsets without gaps; flatten and views are inverse."""
    assert [fragment.index for fragment in fragments] == list(range(count))
    held: dict[str, list[tuple[int, int]]] = {spec.name: [] for spec in specs}
    for fragment in fragments:
        end = 0
        for piece in fragment.pieces:
            assert piece.offset == end
            end += piece.numel
            held[piece.spec.name].append((piece.start, piece.stop))
        assert fragment.numel == end
    for spec in specs:
        rows = [row for start, stop in held[spec.name] for row in range(start, stop)]
        assert sorted(rows) == list(range(spec.rows)), f"{spec.name}: {held[spec.name]}"
    values = {spec.name: torch.rand(spec.shape) for spec in specs}
    back = {name: torch.full_like(value, math.nan) for name, value in values.items()}
    for fragment in fragments:
        for piece, view in fragment.views(fragment.flatten(values)):
            target = back[piece.spec.name]
            (target[piece.start : piece.stop] if piece.spec.shape else target).copy_(view)
    assert all(torch.equal(back[name], values[name]) for name in values)


def refusal(partition: Callable[[], object]) -> str | None:
    """What is wrong with it, if anything is."""
    try:
        partition()
    except ValueError as error:
        return str(error)
    return None


def same_in_any_order(specs: Specs, partition, count: int) -> None:
    shuffled = random.Random(len(specs)).sample(specs, len(specs))
    assert partition(shuffled, count) == partition(specs, count)
    assert fingerprint(partition(shuffled, count)) == fingerprint(partition(specs, count))


@given(models())
def test_the_whole_model_is_one_fragment(specs):
    check(specs, whole_model(specs), 1)
    same_in_any_order(specs, lambda s, _: whole_model(s), 1)


@settings(max_examples=150)
@given(models(), st.integers(1, 8))
def test_balanced_holds_every_element_once_or_says_that_there_are_too_few(specs, count):
    message = refusal(lambda: balanced(specs, count))
    if message is not None:
        assert "would be empty; use fewer fragments" in message
        assert len(specs) < count, "there are tensors enough"
        return
    fragments = balanced(specs, count)
    check(specs, fragments, count)
    same_in_any_order(specs, balanced, count)


@settings(max_examples=100)
@given(large_models(), st.integers(1, 16))
def test_a_balanced_fragment_is_at_most_a_third_and_a_row_above_the_mean_unless_of_whole_large_tensors(
    specs, count
):
    """Greedy: the last item came to the lightest fragment, which held no more than the mean, and it was the smallest."""
    if refusal(lambda: balanced(specs, count)):
        return
    fragments = balanced(specs, count)
    check(specs, fragments, count)
    mean = sum(spec.numel for spec in specs) / count
    row = max(spec.numel // spec.rows for spec in specs)
    for fragment in fragments:
        if fragment.numel > 4 / 3 * mean + row:
            assert all(piece.numel == piece.spec.numel > mean / 3 for piece in fragment.pieces)


@settings(max_examples=150)
@given(models(), st.integers(1, 6), st.booleans())
def test_layers_stay_whole(specs, count, strided):
    partition = lambda s, c: by_layer(s, c, strided)
    layers = {int(spec.name.split(".")[1]) for spec in specs if spec.name.startswith("layers.")}
    if len(layers) < count:
        with pytest.raises(ValueError, match=rf"there are {len(layers)} layers for {count} fragments"):
            partition(specs, count)
        return
    fragments = partition(specs, count)
    check(specs, fragments, count)
    same_in_any_order(specs, partition, count)
    place = {piece.spec.name: fragment.index for fragment in fragments for piece in fragment.pieces}
    for rank, layer in enumerate(sorted(layers)):
        found = {place[spec.name] for spec in specs if spec.name.startswith(f"layers.{layer}.")}
        assert found == {rank % count if strided else rank * count // len(layers)}
    if "tok_embeddings.weight" in place:
        assert place["tok_embeddings.weight"] == 0
    if "lm_head.weight" in place:
        assert place["lm_head.weight"] == count - 1


@settings(max_examples=100)
@given(models(), st.randoms(use_true_random=False), st.integers(1, 5))
def test_explicit_lists_of_modules_hold_every_tensor_once(specs, rng, count):
    modules = sorted({spec.name.rpartition(".")[0] for spec in specs})
    roots = [
        m for m in modules if not any(m != other and f"{m}.".startswith(f"{other}.") for other in modules)
    ]
    if len(roots) < count:
        return
    lists: list[list[str]] = [[] for _ in range(count)]
    for i, module in enumerate(rng.sample(roots, len(roots))):
        lists[i % count].append(module)
    fragments = by_modules(specs, lists)
    check(specs, fragments, count)
    same_in_any_order(specs, lambda s, _: by_modules(s, lists), count)
    for fragment in fragments:
        for piece in fragment.pieces:
            assert any(f"{piece.spec.name}.".startswith(f"{m}.") for m in lists[fragment.index])


def specs_of(**shapes: tuple[int, ...]) -> Specs:
    return [TensorSpec(name.replace("__", "."), shape, torch.float32) for name, shape in shapes.items()]


LLAMA = specs_of(tok_embeddings__weight=(40, 4), layers__0__w=(4, 4), layers__1__w=(4, 4), norm__weight=(4,))


@pytest.mark.parametrize(
    "lists, message",
    [
        (
            [["tok_embeddings"], ["layers.0", "layers.1"]],
            "norm.weight is in no fragment; name its module, norm, in",
        ),
        (
            [["tok_embeddings", "layers", "norm"], ["layers.1"]],
            r"layers.1.w is in fragments \[0, 1\], by layers and layers.1; keep it in one",
        ),
        (
            [["tok_embeddings", "norm"], ["layers.0"], ["layers.0", "layers.1"]],
            r"layers.0.w is in fragments \[1, 2\], by layers.0; keep it in one of the lists",
        ),
        (
            [["tok_embeddings", "norm"], ["layers"], ["lm_head"]],
            "the model has no module lm_head; its modules are tok_embeddings, layers, norm and what is in them",
        ),
        ([["nosuch"]], "the model has no module nosuch; its modules are tok_embeddings"),
        ([["tok_embeddings", "norm", "layers"], []], "fragment 1 of 2 would be empty; use fewer fragments"),
        (
            [["tok_embeddings", "norm", "layers.", "layer"]],
            "the model has no module layers., layer; its modules are",
        ),
    ],
)
def test_explicit_lists_that_are_wrong_say_what(lists, message):
    with pytest.raises(ValueError, match=message):
        by_modules(LLAMA, lists)


@pytest.mark.parametrize("partition", [whole_model, lambda s: balanced(s, 1), lambda s: by_layer(s, 1, True)])
def test_two_tensors_of_one_name_are_refused(partition):
    with pytest.raises(ValueError, match=r"not unique: \['layers.0.w', 'layers.0.w'\]"):
        partition([*LLAMA, LLAMA[1]])


def test_an_embedding_larger_than_a_share_is_cut_by_rows():
    fragments = balanced(LLAMA, 4)
    pieces = [
        piece for fragment in fragments for piece in fragment.pieces if piece.spec.name.startswith("tok")
    ]
    assert len(pieces) >= 3
    assert all("[" in piece.name for piece in pieces)
    assert max(fragment.numel for fragment in fragments) <= 4 / 3 * sum(s.numel for s in LLAMA) / 4


def test_the_debug_model_of_torchtitan_is_balanced_within_a_third():
    """What TorchTitan's llama3 debug model would be cut into: dim 256, 6 layers, 2048 tokens."""
    specs = [TensorSpec(n, (2048, 256), torch.float32) for n in ("tok_embeddings.weight", "lm_head.weight")]
    for i in range(6):
        specs += [TensorSpec(f"layers.{i}.w{j}", (768, 256), torch.float32) for j in (1, 2, 3)]
        specs += [TensorSpec(f"layers.{i}.{w}", (256, 256), torch.float32) for w in ("wq", "wk", "wv", "wo")]
        specs += [
            TensorSpec(f"layers.{i}.{n}", (256,), torch.float32) for n in ("attention_norm", "ffn_norm")
        ]
    total = sum(spec.numel for spec in specs)
    for count in range(1, 25):
        assert max(f.numel for f in balanced(specs, count)) <= 4 / 3 * total / count
