"""What the hub has to know of a run to merge for it. It comes from the islands, so the hub needs neither model nor TOML."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, get_args

import torch

from torchtitan_diloco.outer.codec import Codec, make_codec
from torchtitan_diloco.outer.fragments import Fragment, Piece, TensorSpec
from torchtitan_diloco.outer.merge import Weight
from torchtitan_diloco.outer.merger import Merger
from torchtitan_diloco.outer.optimizer import OuterSGD, Schedule, Shape
from torchtitan_diloco.outer.policy import Member
from torchtitan_diloco.outer.slices import count_for
from torchtitan_diloco.outer.slots import SlotClock
from torchtitan_diloco.outer.state import FragmentState, OuterState

MOST_FRAGMENTS, MOST_VALUES = 10_000, 1 << 40

HUB = -1
"""In the place of an island's number, where the hub encodes."""


@dataclass(frozen=True, slots=True)
class Terms:
    """What all islands of a run have agreed on.

    settings: dotted key -> JSON value, as islands compare them. sizes: values of each fragment. hand_over: see
    ``OuterState``.
    """

    run_id: str
    settings: Mapping[str, Any]
    sizes: tuple[int, ...]
    hand_over: bool

    @property
    def islands(self) -> int:
        """How many found the run."""
        return int(self.settings["semi_sync.num_islands"])

    @property
    def found(self) -> str:
        """Which of them may do so once patience is over; islands of earlier versions do not say."""
        return str(self.settings.get("semi_sync.found", "wait_all"))

    @property
    def _codec(self) -> Codec:
        get = lambda name: self.settings[f"semi_sync.codec.{name}"]
        return make_codec(get("wire"), block=get("block"), density=get("density"), rounding=get("rounding"))

    def fragments(self) -> tuple[Fragment, ...]:
        """As flat tensors without names: what is in them matters to islands only."""
        specs = [TensorSpec(f"fragment {i}", (size,), torch.float32) for i, size in enumerate(self.sizes)]
        return tuple(
            Fragment(i, (Piece(spec, 0, 0, size),))
            for i, (spec, size) in enumerate(zip(specs, self.sizes, strict=True))
        )

    def merger(self) -> Merger:
        """The hub merges whole fragments and sends them encoded, with a residual of its own."""
        return Merger(
            self._codec,
            self.settings["semi_sync.merge.weight"],
            self.fragments(),
            count_for(self.islands),
            bool(self.settings["semi_sync.codec.error_feedback"]),
            self.run_id,
            HUB,
        )

    def optimizer(self) -> OuterSGD:
        if self.settings["semi_sync.method"] == "local_sgd":
            return OuterSGD(lr=1.0)
        get = lambda name: self.settings[f"semi_sync.outer.{name}"]
        schedule = Schedule(get("schedule"), get("min_lr_factor"), self.clock().slots)
        return OuterSGD(get("lr"), get("momentum"), get("nesterov"), schedule)

    def clock(self) -> SlotClock:
        return SlotClock(
            self.settings["semi_sync.sync_every"], self.settings["training.steps"], len(self.sizes)
        )

    def blank(self) -> OuterState:
        """A state that holds nothing yet."""
        states = [FragmentState(torch.empty(0), None, 0, "") for _ in self.sizes]
        members = dict.fromkeys(range(self.islands))
        return OuterState(
            self.fragments(), self.optimizer(), states, members=members, hand_over=self.hand_over
        )

    def prolong(self, other: "Terms") -> bool:
        """Whether these are the other terms with more steps."""
        only_steps = self.differences(other) == ["training.steps"]
        return only_steps and self.clock().steps > other.clock().steps

    def carry(self, state: OuterState) -> OuterState | None:
        """A state of other terms under these; None where it does not fit them."""
        new, old = self.blank(), state
        sizes = tuple(fragment.numel for fragment in old.fragments)
        momentum = new.optimizer.keeps_momentum == old.optimizer.keeps_momentum
        if sizes != self.sizes or not momentum or self.hand_over != old.hand_over:
            return None
        return replace(
            new,
            states=list(old.states),
            slot=old.slot,
            positions=dict(old.positions),
            members=dict(old.members),
        )

    def to_json(self) -> dict[str, Any]:
        return {
            "run_id": self.run_id,
            "settings": dict(self.settings),
            "sizes": list(self.sizes),
            "hand_over": self.hand_over,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "Terms":
        """Raises ValueError when something is missing, or no hub could merge by it."""
        try:
            terms = cls(
                str(data["run_id"]),
                dict(data["settings"]),
                tuple(int(size) for size in data["sizes"]),
                bool(data["hand_over"]),
            )
            if not 1 <= len(terms.sizes) <= MOST_FRAGMENTS or min(terms.sizes) < 1 or terms.islands < 1:
                raise ValueError(f"{len(terms.sizes)} fragments, {terms.islands} islands")
            if sum(terms.sizes) > MOST_VALUES:
                raise ValueError(f"a model of {sum(terms.sizes)} values")
            for name in ("semi_sync.num_islands", "semi_sync.sync_every", "training.steps"):
                if type(terms.settings[name]) is not int or not 1 <= terms.settings[name] < 1 << 53:
                    raise ValueError(f"{name} is {terms.settings[name]!r}")
            for name in ("lr", "momentum", "min_lr_factor"):
                value = terms.settings[f"semi_sync.outer.{name}"]
                if type(value) not in (int, float) or not abs(value) < 1e9:
                    raise ValueError(f"semi_sync.outer.{name} is {value!r}")
            if terms.settings["semi_sync.outer.schedule"] not in get_args(Shape):
                raise ValueError(f"schedule {terms.settings['semi_sync.outer.schedule']!r}")
            if terms.settings["semi_sync.merge.weight"] not in get_args(Weight):
                raise ValueError(f"weight {terms.settings['semi_sync.merge.weight']!r}")
            if terms.settings["semi_sync.merge.method"] != "mean":
                raise ValueError(f"merge rule {terms.settings['semi_sync.merge.method']!r}")
            terms.clock(), terms._codec, terms.optimizer()
        except (KeyError, TypeError, AttributeError, ArithmeticError) as error:
            raise ValueError(f"the run's settings are malformed: {error!r}") from error
        return terms

    def disagreement(self, other: "Terms") -> str:
        """Why an island with the other terms cannot be in this run; empty when it can."""
        if other.run_id != self.run_id:
            return f"this hub serves run {self.run_id}, not {other.run_id}"
        mine, theirs = self.settings, other.settings
        shown = [f"{k}: {theirs.get(k)!r} here, {mine.get(k)!r} in the run" for k in self.differences(other)]
        return f"the islands of a run must agree on {'; '.join(shown)}" if shown else ""

    def differences(self, other: "Terms") -> list[str]:
        """Keys in which islands of this and of the other terms cannot be in one run."""
        mine, theirs = self.settings, other.settings
        keys = sorted(k for k in mine.keys() | theirs.keys() if mine.get(k) != theirs.get(k))
        return keys or (
            [] if (self.sizes, self.hand_over) == (other.sizes, other.hand_over) else ["fragments"]
        )


@dataclass(frozen=True, slots=True)
class Hello:
    """What an island brings; as ``exchange.transport.Hello``, with its outer state described and the terms it knows.

    overdue: it has waited for others for as long as it has patience.
    """

    member: Member
    started: float
    terms: Terms
    step: int
    state: Mapping[str, Any]
    overdue: bool = False
