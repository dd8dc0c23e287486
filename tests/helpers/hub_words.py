"""What islands say to a hub, as values for tests that call it without HTTP."""

from typing import Any

import torch

from tests.helpers.hub_islands import RUN, delta_of, fragments_of, settings_of
from torchtitan_diloco.config.own import CodecConfig
from torchtitan_diloco.hub.hub import Hub, Rules
from torchtitan_diloco.hub.store import Store
from torchtitan_diloco.hub.terms import Hello, Terms
from torchtitan_diloco.outer.optimizer import OuterSGD
from torchtitan_diloco.outer.policy import Header, Member
from torchtitan_diloco.outer.state import OuterState

SIZES = (5, 8)


class Clock:
    def __init__(self) -> None:
        self.t = 1000.0

    def __call__(self) -> float:
        return self.t


def terms_of(islands: int = 2, sizes: tuple[int, ...] = SIZES, **changed: Any) -> Terms:
    settings = settings_of(islands, CodecConfig(), 4000) | changed
    return Terms(RUN, settings, sizes, False)


def fresh_state(islands: int = 2, sizes: tuple[int, ...] = SIZES) -> OuterState:
    anchors = [torch.zeros(size) for size in sizes]
    return OuterState.found(fragments_of(sizes), OuterSGD(0.7, 0.9, True), anchors, islands, hand_over=False)


class Talker:
    """An island that speaks to a hub directly. It applies nothing, unless told to take the hub's state."""

    def __init__(self, hub: Hub, island: int, incarnation: str = "a", started: float = 1.0) -> None:
        self.hub, self.member, self.started = hub, Member(island, incarnation), started
        self.state = fresh_state()

    def hello(self, terms: Terms | None = None, overdue: bool = False) -> dict[str, Any]:
        state = self.state.describe()
        return self.hub.join(Hello(self.member, self.started, terms or terms_of(), 0, state, overdue))

    def join(self, **changed: Any) -> dict[str, Any]:
        """Until it is told to wait or to take; it brings what it is asked for. changed: settings."""
        while (reply := self.hello(terms_of(**changed)))["status"] == "upload":
            for name, ranges in reply["missing"].items():
                values = self.state.tensors()[name].view(torch.uint8).numpy().data
                for start, stop in ranges:
                    self.hub.bring(self.member, name).write(start, values[start:stop])
        return reply

    def enter(self, **changed: Any) -> None:
        reply = self.join(**changed)
        assert reply["status"] == "take", reply
        self.take()
        self.hub.admit(self.member, self.state.slot)

    def take(self) -> None:
        offered = self.hub.shelve(self.member)
        tensors = {name: self.hub.shelf.tensor(offered["key"], name) for name in offered["tensors"]}
        self.state.restore(offered["state"], tensors)

    def header(self, slot: int, steps: int = 4, tokens: int = 40, finite: bool = True) -> Header:
        held = self.state.states[slot % len(SIZES)]
        return Header(
            self.member.island, slot, slot % len(SIZES), held.version, held.digest, held.lineage, held.tokens,
            steps, tokens, finite, {f"a/{self.member.island}": slot + 1}, {}, {"a": "0-9"}, False,
        )  # fmt: skip

    def say(self, slot: int, **how: Any) -> dict[str, Any]:
        return self.hub.announce(self.member, self.header(slot, **how))

    def send(self, slot: int, part: float = 1.0) -> None:
        fragment = slot % len(SIZES)
        plan = self.hub._merger._plans[fragment]
        payload = torch.empty(plan.nbytes, dtype=torch.uint8)
        plan.encode(delta_of(self.member.island, slot, SIZES[fragment]), payload)
        data = payload.numpy().data[: int(part * plan.nbytes)]
        self.hub.upload(self.member, slot, plan.nbytes).write(0, data)

    def outcome(self, slot: int) -> dict[str, Any]:
        return self.hub.outcome(self.member, slot)

    def beat(self, idle_s: float = 0.0, step: int = 0) -> dict[str, Any]:
        return self.hub.beat(self.member, step, self.state.slot, idle_s)


def a_hub(clock: Clock | None = None, store: Store | None = None, **rules: float) -> Hub:
    return Hub(Rules(**{"lease_s": 5.0, "hang_s": 600.0, "wait_s": 3600.0} | rules), store, clock or Clock())


def a_run(hub: Hub, islands: int = 2, **changed: Any) -> list[Talker]:
    """Founded, everybody admitted. changed: settings."""
    talkers = [Talker(hub, island) for island in range(islands)]
    for talker in talkers:
        talker.join(**changed)
    for talker in talkers:
        talker.enter(**changed)
    return talkers


def merge(hub: Hub) -> bool:
    """Do the merge that is ready, if one is."""
    job = hub.take_job()
    if job is not None:
        job.run()
        hub.done(job)
    return job is not None


def commit(hub: Hub, talkers: list[Talker], slot: int) -> None:
    """All of them contribute to a slot and take its result."""
    for talker in talkers:
        talker.say(slot)
    for talker in talkers:
        talker.send(slot)
    assert merge(hub)
    for talker in talkers:
        assert talker.outcome(slot)["status"] == "committed"
        talker.take()
