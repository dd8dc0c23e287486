"""gather -> scatter -> gather is the identity on one rank, for every kind of tensor that an island exchanges."""

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from tests.helpers import layouts
from torchtitan_diloco.errors import UserError
from torchtitan_diloco.island.group import IslandGroup
from torchtitan_diloco.island.layout import Report
from torchtitan_diloco.island.parameters import IslandParameters


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The facts of a variant, each trained once."""
    folder, known = tmp_path_factory.mktemp("alone"), {}

    def facts(variant: str) -> dict:
        if variant not in known:
            known[variant] = layouts.alone(variant, folder)
            known[variant]["file"] = folder / f"alone-{variant}.safetensors"
        return known[variant]

    return facts


@pytest.mark.parametrize("variant", layouts.VARIANTS)
def test_scattered_values_come_back_bit_for_bit(variant, alone):
    facts = alone(variant)
    assert facts["trained"] and facts["random_values_changed_it"]
    assert facts["identity"]
    assert facts["random_logits"] != facts["logits"]


@pytest.mark.parametrize("variant", layouts.VARIANTS)
def test_each_fragment_is_scattered_and_mixed_by_itself_rows_of_cut_tensors_included(variant, alone):
    facts = alone(variant)
    assert facts["cut"] >= 2
    assert facts["fragments_hold"] == facts["fragments_mix"] == [True] * layouts.FRAGMENTS


def test_activation_checkpoint_wrappers_change_neither_names_nor_bits(alone):
    plain, wrapped = alone("plain"), alone("wrapped")
    assert wrapped["wrappers"] > 0 and plain["wrappers"] == 0
    assert wrapped["tensors"] == plain["tensors"]
    assert wrapped["founding"] == plain["founding"] and wrapped["random"] == plain["random"]
    assert load_file(wrapped["file"])["flat"].equal(load_file(plain["file"])["flat"])


def test_tied_embeddings_are_one_tensor(alone):
    assert set(alone("plain")["tensors"]) - set(alone("tied")["tensors"]) == {"lm_head.weight"}


def test_frozen_parameters_are_exchanged_although_training_leaves_them(alone):
    facts = alone("frozen")
    assert set(layouts.FROZEN) <= set(facts["tensors"])
    assert not set(layouts.FROZEN) & set(facts["changed"])


def test_bfloat16_parameters_are_rounded_once(alone):
    assert {dtype for _, dtype in alone("bfloat16")["tensors"].values()} == {"torch.bfloat16"}


def test_persistent_float_buffers_are_exchanged_and_others_left_alone(alone):
    facts = alone("buffers")
    assert set(facts["tensors"]) - set(alone("plain")["tensors"]) == {layouts.BUFFER}
    assert layouts.BUFFER in facts["changed"]
    assert facts["scratch"] == [[2.5], [2.5]]


def test_two_tensors_of_one_name_are_refused():
    class Part(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(2))

    with pytest.raises(UserError, match="two tensors are called weight"):
        IslandParameters([Part(), Part()], IslandGroup())


class TwoRanks(IslandGroup):
    """This process as ``rank`` of two; the other rank has reported already."""

    def __init__(self, rank: int, other: Report) -> None:
        self.rank, self.size, self.other = rank, 2, other

    def collect(self, value: Report) -> list[Report]:
        return [value, self.other] if self.rank == 0 else [self.other, value]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_without_a_problem_of_its_own_refuses_with_the_others(rank):
    model = nn.Linear(2, 2, bias=False)
    healthy = IslandParameters(model_parts=[model], group=TwoRanks(rank, Report.of({})))
    assert set(healthy.specs) == {"weight"}
    with pytest.raises(UserError, match="parallelism: experts are odd: this layout cannot be exchanged"):
        IslandParameters([model], TwoRanks(rank, Report.of({}, ["experts are odd"])))
