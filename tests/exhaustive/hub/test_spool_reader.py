"""The hub's end of a spool, turn by turn without a mirror: one slot there and back, and files that must not matter."""

import asyncio
import random
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers.hub_islands import RUN, fragments_of, settings_of
from torchtitan_diloco.config.own import CodecConfig, MergeConfig
from torchtitan_diloco.exchange import spool_link
from torchtitan_diloco.exchange.chunks import Unreachable
from torchtitan_diloco.exchange.spool_link import SpoolLink
from torchtitan_diloco.hub.hub import Hub, Rules
from torchtitan_diloco.hub.refusal import Refusal
from torchtitan_diloco.hub.service import Service
from torchtitan_diloco.hub.spool import SpoolReader
from torchtitan_diloco.hub.spool_files import Outbox, folders
from torchtitan_diloco.hub.terms import Terms
from torchtitan_diloco.hub.upload import Upload
from torchtitan_diloco.outer.optimizer import OuterSGD
from torchtitan_diloco.outer.policy import Header, Member
from torchtitan_diloco.outer.state import OuterState
from torchtitan_diloco.outer.values import Flat
from torchtitan_diloco.semi_sync.wire import Wire

SIZE = 100
ME = Member(0, "a")


@pytest.fixture(autouse=True, scope="module")
def looks_often():
    spool_link.LOOK_S, before = 0.01, spool_link.LOOK_S
    yield
    spool_link.LOOK_S = before


class Side:
    """An island that says its messages one by one, and the hub that reads them from the same folder."""

    def __init__(
        self, spool: Path, rules: Rules | None = None, member: Member = ME, started: float = 1.0
    ) -> None:
        self.spool, self.broken = spool, []
        self.now = 0.0
        self.hub = Hub(rules or Rules(), now=lambda: self.now)
        self.service = Service(self.hub, RUN, self.broken.append)
        self.reader = SpoolReader(spool, self.service, RUN, 1000.0, self.broken.append)
        self.member, self.started = member, started
        fragments = fragments_of((SIZE,))
        self.state = OuterState.found(
            fragments, OuterSGD(0.7, 0.9, True), [torch.zeros(SIZE)], 1, hand_over=False
        )
        self.wire = Wire(CodecConfig(), MergeConfig(), fragments, RUN, 0, 1)
        self.link = SpoolLink(spool, RUN, member, started, self.state.describe, notes_s=0.0)

    async def ask(self, *words, **query):
        """While the question waits, the hub takes its turns."""
        question = asyncio.create_task(asyncio.to_thread(self.link.ask, *words, **query))
        while not question.done():
            await self.turn()
        return question.result()

    async def turn(self) -> None:
        await self.reader.turn()
        await self.service._changed()
        await asyncio.sleep(0.005)

    def hello(self):
        terms = Terms(RUN, settings_of(1, CodecConfig(), 4000), (SIZE,), False)
        body = {"started": self.started, "terms": terms.to_json(), "step": 0, "state": self.state.describe()}
        return "POST", "/join", body

    def put_state(self, reply) -> None:
        for name, ranges in reply["missing"].items():
            self.link.put(
                f"/state/{name}", self.state.tensors()[name].view(torch.uint8), ranges, lambda size: None
            )

    async def join(self) -> None:
        reply = await self.ask(*self.hello())
        if reply["status"] == "upload":
            self.put_state(reply)
            reply = await self.ask(*self.hello())
        assert reply["status"] == "take"
        self.link.ask("POST", "/admit", {"slot": self.state.slot})

    def header(self, slot: int = 0, steps: int = 4) -> Header:
        held = self.state.states[0]
        return Header(
            0,
            slot,
            0,
            held.version,
            held.digest,
            held.lineage,
            held.tokens,
            steps,
            40,
            True,
            {},
            {},
            {},
            False,
        )

    async def slot(self, slot: int = 0):
        reply = self.link.ask("POST", f"/slots/{slot}/header", self.header(slot).to_json())
        payload = self.wire.encode(0, slot, Flat(torch.ones(SIZE)))
        assert reply["missing"]
        self.link.put(f"/slots/{slot}/payload", payload, reply["missing"], lambda size: None)
        return await self.ask("GET", f"/slots/{slot}/outcome", wait_s=10.0)


@asynccontextmanager
async def side(spool: Path, **options):
    one = Side(spool, **options)
    yield one
    assert one.broken == []
    await one.reader._client.aclose()


def run(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, 60))


def test_a_slot_is_one_message_up_and_one_down(tmp_path):
    async def scenario() -> None:
        async with side(tmp_path) as one:
            await one.join()
            reply = await one.slot()
            assert reply["status"] == "committed" and reply["participants"] == [0]
            result = Upload(reply["nbytes"])
            one.link.get("/slots/0/result", result, lambda size: None)
            assert torch.equal(one.wire.merge.decode(0, result.data).delta, torch.ones(SIZE))
            # What was read is collected by its writers, on the next notes.
            one.link.ask("POST", "/beat", {"step": 4, "slot": 1, "idle_s": 0.0})
            await one.turn()
            up, down, _ = folders(tmp_path, RUN)
            assert {path.name.split(".")[0] for path in up.iterdir()} <= {"note", "admit"}
            assert {path.name.split(".")[0] for path in down.iterdir()} <= {"note", "join"}

    run(scenario())


def test_an_admission_that_comes_after_the_first_slot_comes_with_it(tmp_path):
    async def scenario() -> None:
        async with side(tmp_path) as one:
            await one.join()
            up, _, _ = folders(tmp_path, RUN)
            next(up.glob("admit.*")).unlink()
            assert (await one.slot())["status"] == "committed"

    run(scenario())


def test_an_island_behind_gets_the_state_with_the_outcome(tmp_path):
    async def scenario() -> None:
        async with side(tmp_path) as one:
            await one.join()
            await one.slot()
            reply = await one.slot(1)  # it has not applied the first
            assert reply["status"] == "behind"
            state = one.link.ask("GET", "/state")
            assert state["state"]["slot"] == 2
            anchor = Upload(4 * SIZE)
            one.link.get(f"/state/{state['key']}/anchor.0", anchor, lambda size: None)
            assert torch.equal(anchor.data.view(torch.float32), one.hub.state.states[0].anchor)

    run(scenario())


def test_a_hub_that_does_not_know_the_island_says_so_and_takes_it_again(tmp_path):
    async def scenario() -> None:
        async with side(tmp_path) as one:
            with pytest.raises(Refusal) as refused:
                await one.slot()
            assert refused.value.kind == "stranger"
            with pytest.raises(Refusal):
                one.link.ask("POST", "/beat", {"step": 0, "slot": 0, "idle_s": 0.0})
            await one.join()
            one.link.ask("POST", "/beat", {"step": 0, "slot": 0, "idle_s": 0.0})
            assert (await one.slot())["status"] == "committed"

    run(scenario())


def test_silence_within_the_lease_costs_one_wait_and_no_seat(tmp_path):
    async def scenario() -> None:
        async with side(tmp_path, rules=Rules(lease_s=5.0, wait_s=100.0)) as one:
            await one.join()
            while not one.hub.seats.members:
                await one.turn()
            one.now = 900.0
            assert one.hub.tick() == []
            one.hub.seats.excuse([0])
            assert one.hub.seats.awaited(0) == []
            assert (await one.slot())["status"] == "committed"
            assert one.hub.seats.awaited(1) == [0]
            one.now = 2000.0
            (lost,) = one.hub.tick()
            assert "syncer.spool_timeout_s" in lost.why

    run(scenario())


def test_results_for_an_island_that_is_silent_are_not_kept_in_memory(tmp_path):
    async def scenario() -> None:
        async with side(tmp_path) as one:
            await one.join()
            await one.slot()
            await one.turn()
            one.hub.tick()
            one.hub._forget()
            assert one.hub.payloads == {}

    run(scenario())


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
KEYS = ("header", "admit", "holds", "state", "terms", "started", "step", "beat", "read", "refused", "slot")
BODIES = st.dictionaries(st.sampled_from(KEYS), JSON, max_size=6)
KINDS = st.sampled_from(
    ["join", "admit", "state", "slot-0", "slot-1", "slot", "withdraw-0", "leave", "note", "nonsense-7"]
)


@given(st.lists(st.tuples(KINDS, BODIES, st.booleans()), min_size=1, max_size=12))
@settings(max_examples=25, deadline=None)
def test_well_formed_files_with_nonsense_in_them_change_nothing(tmp_path_factory, messages):
    spool = tmp_path_factory.mktemp("spool")

    async def scenario() -> None:
        async with side(spool) as one:
            await one.join()
            while not one.hub.seats.members:
                await one.turn()
            before = (one.hub.state.describe(), dict(one.hub.records), dict(one.hub.open))
            out, stranger = Outbox(folders(spool, RUN)[0]), Member(7, "b")
            for sequence, (kind, body, payload) in enumerate(messages):
                part = {"payload": out.part(kind, stranger, sequence, memoryview(b"123"))} if payload else {}
                out.send(kind, stranger, sequence, 3.0, body, part)
            for _ in range(3):
                await one.turn()
            assert (one.hub.state.describe(), one.hub.records, one.hub.open) == before
            assert (await one.slot())["status"] == "committed"  # and the others go on

    run(scenario())


@pytest.mark.parametrize("seed", range(6))
def test_doubled_damaged_and_reordered_copies_of_a_contribution_count_once(tmp_path, seed):
    async def scenario() -> None:
        chance = random.Random(seed)
        async with side(tmp_path) as one:
            await one.join()
            while not one.hub.seats.members:
                await one.turn()
            one.link.ask("POST", "/slots/0/header", one.header().to_json())
            one.link.put(
                "/slots/0/payload", one.wire.encode(0, 0, Flat(torch.ones(SIZE))), [], lambda size: None
            )
            up, _, _ = folders(tmp_path, RUN)
            whole = {path: path.read_bytes() for path in up.glob("slot-0.*")}
            for path in whole:
                path.unlink()
            for path in chance.sample(sorted(whole) * 3, 6):
                content = whole[path]
                path.write_bytes(chance.choice([content, content[: len(content) // 2], b""]))
                await one.turn()
            for path, content in whole.items():
                path.write_bytes(content)
            reply = await one.ask("GET", "/slots/0/outcome", wait_s=10.0)
            assert reply["status"] == "committed"
            assert one.hub.state.states[0].version == 1 and list(one.hub.records) == [0]

    run(scenario())


def test_a_contribution_without_its_payload_is_refused_and_holds_up_nobody(tmp_path):
    async def scenario() -> None:
        async with side(tmp_path) as one:
            await one.join()
            while not one.hub.seats.members:
                await one.turn()
            body = {"header": one.header().to_json(), "admit": None, "holds": None}
            Outbox(folders(tmp_path, RUN)[0]).send("slot-0", ME, 99, 1.0, body)
            for _ in range(3):
                await one.turn()
            assert one.hub.open == {}

    run(scenario())


def test_what_is_not_there_yet_is_out_of_reach(tmp_path):
    link = SpoolLink(tmp_path, RUN, ME, 1.0, dict)
    assert link.ask("GET", "/slots/0/outcome") == {"status": "unknown"}
    with pytest.raises(Unreachable):
        link.get("/slots/0/result", Upload(3), lambda size: None)
    with pytest.raises(Unreachable):
        link.ask("POST", "/admit", {"slot": 0})


def test_an_island_that_is_to_stop_leaves_a_slot_when_the_hub_says_so(tmp_path):
    async def scenario() -> None:
        async with side(tmp_path, rules=Rules(wait_s=100.0)) as one:
            await one.join()
            while not one.hub.seats.members:
                await one.turn()
            await other_member(one)
            one.link.ask("POST", "/slots/0/header", one.header().to_json())
            one.link.put(
                "/slots/0/payload", one.wire.encode(0, 0, Flat(torch.ones(SIZE))), [], lambda size: None
            )
            while not one.hub.open:
                await one.turn()
            assert (await one.ask("POST", "/slots/0/withdraw"))["status"] == "withdrawn"
            assert one.hub.open == {}

    run(scenario())


async def other_member(one: Side) -> None:
    """A second island, which every slot waits for."""
    link = SpoolLink(one.spool, RUN, Member(1, "a"), 1.0, one.state.describe, notes_s=0.0)
    question = asyncio.create_task(asyncio.to_thread(link.ask, *one.hello()))
    while not question.done():
        await one.turn()
    assert question.result()["status"] == "take"
    link.ask("POST", "/admit", {"slot": 0})
    while len(one.hub.seats.members) < 2:
        await one.turn()


def test_what_an_island_that_leaves_has_sent_is_taken_back_where_no_mirror_has_come_for_it(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(spool_link, "ASK_S", 0.05)
    one = Side(tmp_path)
    one.link.ask("POST", "/slots/0/header", one.header().to_json())
    one.link.put("/slots/0/payload", one.wire.encode(0, 0, Flat(torch.ones(SIZE))), [], lambda size: None)
    with pytest.raises(Unreachable):
        one.link.ask("POST", "/slots/0/withdraw")
    one.link.ask("POST", "/leave", {"reason": "drain"})
    assert [path.name.split(".")[0] for path in folders(tmp_path, RUN)[0].iterdir()] == ["leave"]
