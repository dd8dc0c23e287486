"""What an attempt's bulk sends to whom: whole payloads among few islands, slices to their owners and back among many."""

from collections.abc import Sequence
from typing import Protocol

import torch

from torchtitan_diloco.exchange.attempt import Bulk, Offer, Stage
from torchtitan_diloco.outer.merge import Contribution, Merged
from torchtitan_diloco.outer.slices import FEW, Division, owners


class Merge(Protocol):
    """How payloads become the merged delta. All but the call is asked for beyond ``slices.FEW`` members only."""

    def __call__(self, fragment: int, contributions: Sequence[Contribution]) -> tuple[Merged, list[float]]:
        """Of whole payloads: (merged delta, weights)."""

    def sizes(self, fragment: int) -> tuple[int, ...]:
        """Bytes of each slice of a payload; a single one where fragments are not cut."""

    def own(
        self, fragment: int, slot: int, slices: Sequence[int], contributions: Sequence[Contribution]
    ) -> tuple[torch.Tensor, list[float]]:
        """Of the slices that this island owns: (encoded merged slices, weights)."""

    def decode(self, fragment: int, payload: torch.Tensor) -> Merged:
        """The merged delta from the encoded merged slices of all owners."""


def first_bulk(offer: Offer, island: int, merge: Merge) -> Bulk:
    """The bulk that an attempt begins with, once its roll is called. All members decide alike."""
    assert offer.roll is not None
    members, contributors = offer.roll.members, offer.roll.contributors
    sizes = merge.sizes(offer.header.fragment) if len(members) > FEW else ()
    stage: Stage = "whole"
    size, sends = offer.payload.nbytes, [offer.payload] * len(members)
    if len(sizes) > 1:
        stage, offer.division = "slices", Division(owners(members, len(sizes)), sizes)
        size, sends = offer.division.nbytes(island), [offer.division.part(offer.payload, i) for i in members]
    # A listener takes the result, and owns slices like the others, but has nothing to say.
    if island not in contributors:
        sends = [offer.payload[:0]] * len(members)
    return _bulk(offer, stage, sends, [size if i in contributors else 0 for i in members])


def second_bulk(offer: Offer, part: torch.Tensor) -> Bulk:
    """This island's merged slices for those of all the others."""
    assert offer.roll is not None and offer.division is not None
    coming = [offer.division.nbytes(i) for i in offer.roll.members]
    return _bulk(offer, "merged", [part] * len(coming), coming)


def _bulk(offer: Offer, stage: Stage, sends: Sequence[torch.Tensor], sizes: Sequence[int]) -> Bulk:
    assert offer.epoch is not None and offer.roll is not None
    offer.stage = stage
    members = tuple(m for m in offer.epoch.members if m.island in offer.roll.members)
    return Bulk(
        (offer.slot, offer.epoch.id),
        stage,
        offer.header.fragment,
        members,
        whole=members == offer.epoch.members,
        sends=tuple(sends),
        sizes=tuple(sizes),
    )
