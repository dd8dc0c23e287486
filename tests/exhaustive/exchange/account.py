"""What entered the anchor, kept beside the simulated islands: which inner steps, of whom, in which history."""

from dataclasses import dataclass, field

import torch

from torchtitan_diloco.exchange.messages import Outcome


@dataclass(frozen=True)
class Work:
    """Inner steps ``start`` to ``end`` of one incarnation, offered in a slot as a delta."""

    island: int
    incarnation: int
    slot: int
    start: int
    end: int
    tokens: int
    delta: torch.Tensor


@dataclass
class Account:
    """An offer is recognised by its number, which its header carries as the position of the island's stream.

    lost: what encoding may change of a merged delta, as a share of its largest value.
    """

    offers: list[Work] = field(default_factory=list)
    slots: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """Lineage of a fragment -> the numbers of the offers that its last slot counted."""
    until: dict[str, dict[tuple[int, int], int]] = field(default_factory=lambda: {"": {}})
    """Lineage of a fragment -> (island, incarnation) -> the last inner step that is in it."""
    holders: dict[tuple[int, int], dict[str, set[int]]] = field(default_factory=dict)
    """(fragment, version) -> digest -> incarnations that ever held it."""
    lost: float = 0.0

    def offer(self, work: Work) -> int:
        self.offers.append(work)
        return len(self.offers)  # from 1 on: a stream at 0 has not been read

    def commit(self, parent: str, lineage: str, outcome: Outcome, delta: torch.Tensor) -> None:
        """A slot of the fragment has led from one lineage to the next, by a merged delta. All who commit count the same."""
        numbers = tuple(outcome.positions[i][f"a/{i}"] for i in outcome.participants)
        if self.slots.setdefault(lineage, numbers) != numbers:
            raise AssertionError(f"slot {outcome.slot} counted {numbers} and {self.slots[lineage]}")
        if lineage in self.until:
            return
        until = dict(self.until[parent])
        total = sum(self.offers[n - 1].tokens ** 2 / steps(self.offers[n - 1]) for n in numbers)
        merged = torch.zeros_like(self.offers[0].delta, dtype=torch.float64)
        for island, number in zip(outcome.participants, numbers, strict=True):
            work = self.offers[number - 1]
            assert (work.island, work.slot) == (island, outcome.slot), f"slot {outcome.slot} counted {work}"
            key = (island, work.incarnation)
            assert work.start >= until.get(key, 0), (
                f"slot {outcome.slot} counts steps {work.start} to {work.end} of island {island}, "
                f"which are in it up to {until[key]}"
            )
            until[key] = work.end
            merged += work.delta.double() * (work.tokens**2 / steps(work) / total)
        largest = max(float(self.offers[n - 1].delta.abs().max()) for n in numbers)
        bound = 1e-3 + self.lost * largest
        assert torch.allclose(delta.double(), merged, rtol=1e-5, atol=bound), (
            f"slot {outcome.slot} merged something else than what it counted"
        )
        self.until[lineage] = until

    def hold(self, fragment: int, version: int, digest: str, incarnation: int, living: set[int]) -> None:
        """Never two digests for one version, unless nobody is alive who has ever held one of them."""
        digests = self.holders.setdefault((fragment, version), {})
        digests.setdefault(digest, set()).add(incarnation)
        if len(digests) > 1:
            held = [d for d, incarnations in digests.items() if incarnations & living]
            assert len(held) <= 1, f"version {version} of fragment {fragment} has two digests"


def steps(work: Work) -> int:
    return work.end - work.start
