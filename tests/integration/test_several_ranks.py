"""Islands of several ranks: layouts gather and scatter the same bits, and our trainer trains as TorchTitan's does.

All cases share one start, see ``tests.helpers.world``.
"""

import pytest
import torch

from tests.helpers import islands, layouts, tiny
from tests.helpers.world import facts, run_cases

ROUND_TRIPS = [
    *[(2, "fsdp", variant) for variant in layouts.VARIANTS],
    (2, "tp", "plain"),
    (2, "tp", "tied"),
    (2, "tp", "wrapped"),
    (2, "pp", "plain"),
    (4, "fsdp-tp", "plain"),
    (4, "fsdp-tp", "tied"),
    (4, "hsdp", "vocabulary-61"),
]
TRAINING = {"steps": 20, "vocab": 64, "batch": 2, "lr": 3e-3}
METHODS = {"torchtitan": None, "none": "none", "diloco": "diloco"}


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """Folder and facts of all variants on one rank."""
    folder = tmp_path_factory.mktemp("ranks")
    return folder, {variant: layouts.alone(variant, folder) for variant in layouts.VARIANTS}


@pytest.fixture(scope="module")
def folder(alone):
    """Where the facts of all cases are."""
    folder = alone[0]
    training = {
        "call": "tests.helpers.islands:run_case",
        "size": 2,
        "folder": str(folder),
        "options": TRAINING,
    }
    cases = {name: {**training, "method": method} for name, method in METHODS.items()}
    for size, layout, variant in ROUND_TRIPS:
        cases[f"{layout}-{variant}"] = {
            "call": "tests.helpers.layouts:run_case",
            "size": size,
            "layout": layout,
            "variant": variant,
            "folder": str(folder),
            "gathered_to": str(folder / f"{layout}-{variant}.safetensors"),
            "gathered_elsewhere": str(folder / f"alone-{variant}.safetensors"),
        }
    cases["refused"] = {"call": "tests.helpers.layouts:refused", "size": 2}
    run_cases(folder, cases, timeout_s=40)
    return folder


@pytest.mark.parametrize(
    "layout, variant",
    [pytest.param(*case[1:], id="-".join(case[1:])) for case in ROUND_TRIPS],
)
def test_every_layout_gathers_what_was_scattered_and_what_another_layout_gathered(
    layout, variant, alone, folder
):
    reference = alone[1][variant]
    ranks = facts(folder, f"{layout}-{variant}")
    first = ranks[0]
    if layout != "pp":
        assert all(rank["whole"] < len(rank["tensors"]) for rank in ranks)  # it is spread out indeed
    assert all(rank["tensors"] == reference["tensors"] for rank in ranks)
    assert first["trained"] and first["random_values_changed_it"]
    assert first["identity"] and first["random"] == reference["random"]
    assert first["other_identity"]
    assert first["cut"] == reference["cut"] >= 2
    assert first["fragments_hold"] == first["fragments_mix"] == [True] * layouts.FRAGMENTS
    if layout == "pp":
        return  # no rank has the whole model to answer with, and TorchTitan seeds each stage in a way of its own
    assert first["founding"] == reference["founding"]
    for rank in ranks:
        assert_answers_agree(rank["random_logits"], reference["random_logits"], variant)
        assert_answers_agree(rank["other_logits"], reference["logits"], variant)
    back = layouts.alone(variant, folder, gathered_elsewhere=folder / f"{layout}-{variant}.safetensors")
    assert back["other_identity"]
    assert_answers_agree(back["other_logits"], first["logits"], variant)


def assert_answers_agree(mine: list[float], theirs: list[float], variant: str) -> None:
    """Logits that differ in the order of sums only; measured against the largest, since random weights make them large."""
    precision = 2e-2 if variant == "bfloat16" else 1e-5
    expected = torch.tensor(theirs)
    torch.testing.assert_close(
        torch.tensor(mine), expected, rtol=0, atol=precision * float(expected.abs().max())
    )


def test_a_shard_that_is_not_what_its_placements_say_is_refused_on_every_rank(folder):
    errors = [rank["error"] for rank in facts(folder, "refused")]
    assert errors[0] == errors[1]
    assert errors[0].startswith("parallelism: weight holds (2,) on a rank where its placements")


@pytest.mark.parametrize("method", ["none", "diloco"])
def test_fr_59_two_ranks_of_our_trainer_train_as_two_of_torchtitans_to_the_bit(method, folder):
    theirs, ours = facts(folder, "torchtitan"), facts(folder, method)
    assert [rank["class"] for rank in theirs + ours] == ["Trainer"] * 2 + ["DiLoCoTrainer"] * 2
    assert theirs[0]["steps"] == ours[0]["steps"] == len(ours[0]["logged"]) == TRAINING["steps"]
    assert ours[0]["logged"][-1][0] < 0.8 * ours[0]["logged"][0][0]
    for mine, upstream in zip(ours, theirs, strict=True):
        assert mine["logged"] == upstream["logged"]
    # A run of DiLoCo ends with a slot, which moves the weights.
    assert (ours[0]["weights"] == theirs[0]["weights"]) == (method == "none")


@pytest.mark.parametrize("method", ["none", "diloco"])
def test_fr_59_one_rank_of_our_trainer_trains_as_torchtitans_to_the_bit(method, tmp_path):
    results = []
    for name in (None, method):
        with tiny.single_rank():
            results.append(islands.run_to_the_end(islands.config_of(name, tmp_path, **TRAINING)))
    theirs, ours = results
    assert (theirs["class"], ours["class"]) == ("Trainer", "DiLoCoTrainer")
    assert len(ours["logged"]) == TRAINING["steps"]
    assert ours["logged"] == theirs["logged"]
    # A run of DiLoCo ends with a slot, which moves the weights.
    assert (ours["weights"] == theirs["weights"]) == (method == "none")
