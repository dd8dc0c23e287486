"""Whatever is sent to a hub: it answers with no internal error, says why it refuses, and a refusal changes nothing."""

import asyncio
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.helpers.asgi import Answer, ask
from tests.helpers.hub_islands import RUN
from tests.helpers.hub_words import SIZES, Talker, a_hub, a_run, commit, delta_of, fresh_state, terms_of
from torchtitan_diloco.hub.bulk import CHUNK_LIMIT
from torchtitan_diloco.hub.dial import CHECKSUM, EPOCH, INCARNATION, ISLAND
from torchtitan_diloco.hub.dial import RUN as RUN_HEADER
from torchtitan_diloco.hub.hub import Hub
from torchtitan_diloco.hub.seats import PRESENT
from torchtitan_diloco.hub.service import Service

EXAMPLES = settings(
    max_examples=250, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def a_busy_hub() -> Hub:
    """Slot 0 is committed, the payload of island 1 is missing in slot 1, island 2 is joining."""
    hub = a_hub()
    a, b = a_run(hub)
    commit(hub, [a, b], 0)
    for talker in (a, b):
        talker.say(1)
    a.send(1)
    assert Talker(hub, 2).join()["status"] == "take"
    return hub


def a_founding_hub() -> Hub:
    """Island 0 is there and has brought half of a tensor."""
    hub = a_hub()
    a, b = Talker(hub, 0), Talker(hub, 1)
    a.hello()
    b.hello()
    a.hello()
    hub.bring(a.member, "anchor.0").write(0, bytes(8))
    return hub


HUBS = {"empty": a_hub, "founding": a_founding_hub, "busy": a_busy_hub}


def facts(hub: Hub) -> Any:
    """All that a refused message must leave alone."""
    seats = {
        i: (s.member, s.phase, s.started, s.heard, s.idle_s, s.step, s.slot, s.first, s.founder, s.offered, dict(s.state))
        for i, s in hub.seats._seats.items()
        if s.phase in PRESENT
    }  # fmt: skip
    slots = {
        number: (
            dict(s.headers),
            s.roll,
            s.merging,
            {m: u.missing() for m, u in s.uploads.items() if u.missing() != [(0, u.nbytes)]},
        )
        for number, s in hub.open.items()
    }
    coming = {
        m: {name: u.missing() for name, u in tensors.items()} for m, tensors in hub._arrivals._coming.items()
    }
    state = hub.state.describe() if hub.state else None
    return (
        seats,
        slots,
        coming,
        state,
        dict(hub.records),
        sorted(hub.payloads),
        sorted(hub._withdrawn),
        hub.terms if seats else None,
    )


class Harness:
    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.stopped: list[BaseException] = []
        self.service = Service(a_hub(), RUN, self.stopped.append)

    def check(self, hub: Hub, *request: Any, **more: Any) -> Answer:
        """Send it; what is promised holds. The hub goes on afterwards with what it has accepted."""
        self.service.hub = hub
        before = facts(hub)
        answer = self.loop.run_until_complete(ask(self.service.app, *request, **more))
        self.loop.run_until_complete(self._merges())
        assert answer.status < 500 and EPOCH.encode() in answer.headers
        if answer.status >= 400:
            said = json.loads(answer.body)
            assert said["error"] and said["kind"] in ("malformed", "refused", "stranger", "gone")
            assert facts(hub) == before
        hub.tick()
        hub.shelf.tidy()
        if hub.state is not None:
            json.dumps(hub.state.describe(), allow_nan=False, ensure_ascii=False).encode()
        assert not self.stopped
        return answer

    async def _merges(self) -> None:
        while tasks := list(self.service._tasks):
            await asyncio.gather(*tasks)


@pytest.fixture(scope="module")
def harness() -> Iterator[Harness]:
    harness = Harness()
    yield harness
    harness.service._merging.shutdown()
    harness.loop.close()


# ---- what is sent --------------------------------------------------------------------------------------------------

NUMBERS = st.one_of(
    st.integers(-2, 12), st.sampled_from([2**53, 10**30, 10**400, -(10**400)]), st.floats(), st.booleans()
)
TEXTS = st.one_of(
    st.text(max_size=8), st.sampled_from(["a/0", "0-9", "\ud800", "..", "a" * 3000, "0-999999999999"])
)
VALUES = st.recursive(
    st.one_of(st.none(), NUMBERS, TEXTS),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(TEXTS, inner, max_size=3)),
    max_leaves=6,
)
JUNK = st.one_of(
    st.binary(max_size=40),
    st.sampled_from([b"[" * 100_000, b'{"a":' * 100_000, b"{}", b"null", b'{"slot": NaN}', b"9" * 5000]),
    st.sampled_from([b'{"slot": ' + b"9" * 5000 + b"}", b"\xed\xa0\x80", "{}".encode("utf-16")]),
    VALUES.map(lambda value: json.dumps(value).encode()),
)


def right_messages() -> dict[tuple[str, str], Any]:
    """Messages that the busy hub takes, by request."""
    header = Talker(a_hub(), 1).header(1).to_json()
    hello = {"started": 1.0, "terms": terms_of().to_json(), "step": 0, "state": fresh_state().describe()}
    return {
        ("POST", "/join"): hello,
        ("POST", "/admit"): {"slot": 1},
        ("POST", "/beat"): {"step": 1, "slot": 1, "idle_s": 0.0},
        ("POST", "/leave"): {"reason": "done"},
        ("POST", "/slots/1/header"): header,
        ("POST", "/slots/2/header"): header | {"slot": 2, "fragment": 0},
        ("POST", "/slots/1/withdraw"): {},
    }


MESSAGES = right_messages()
PATHS = st.one_of(
    st.sampled_from(["/", "/state", "/join", "/admit", "/beat", "/leave", "/state/anchor.0", "/state/x/anchor.0"]),
    st.tuples(
        st.one_of(st.integers(0, 3).map(str), st.sampled_from(["9" * 6, "9" * 5000, "-1", "1.5", "²", "x"])),
        st.sampled_from(["header", "payload", "outcome", "result", "withdraw", "other"]),
    ).map("/slots/{0[0]}/{0[1]}".format),
    st.text(max_size=6).map("/{}".format),
)  # fmt: skip
QUERIES = st.dictionaries(
    st.sampled_from(["offset", "size", "of", "wait"]),
    st.sampled_from(["0", "4", "20", "32", "99999999999999999999", "-1", "x", "1e3", "%C2%B2"]),
).map(lambda of: "&".join(f"{k}={v}" for k, v in of.items() if (k, v[:1]) != ("wait", "9")).encode())
WORDS = st.one_of(
    st.binary(max_size=6), st.sampled_from([b"0", b"1", b"2", b"a", b"-1", b"\xb2", b"9" * 5000])
)


@dataclass(frozen=True)
class Head:
    """The headers of a request; None: as they should be."""

    run: bytes | None
    island: bytes | None
    incarnation: bytes | None
    length: bytes | None
    checksum: bytes | None

    def of(self, island: int, body: bytes) -> list[tuple[bytes, bytes]]:
        right = (
            (RUN_HEADER, self.run, RUN.encode()),
            (ISLAND, self.island, str(island).encode()),
            (INCARNATION, self.incarnation, b"a"),
            ("content-length", self.length, str(len(body)).encode()),
            (CHECKSUM, self.checksum, xxhash.xxh3_64_hexdigest(body).encode()),
        )
        return [(name.encode(), value if given is None else given) for name, given, value in right]


ODD = st.one_of(st.none(), st.none(), st.none(), WORDS)
LENGTHS = st.one_of(
    ODD, st.sampled_from([b"0", b"1", b"7", b"100", str(CHUNK_LIMIT).encode(), b"999999999999"])
)
HEADS = st.builds(Head, ODD, ODD, ODD, LENGTHS, ODD)
RIGHT = Head(None, None, None, None, None)


@EXAMPLES
@given(
    kind=st.sampled_from(sorted(HUBS)), method=st.sampled_from(["GET", "POST", "PUT", "DELETE"]),
    path=PATHS, query=QUERIES, head=HEADS, island=st.integers(0, 3), body=JUNK, cut_off=st.booleans(),
)  # fmt: skip
def test_any_request(
    harness: Harness, kind: str, method: str, path: str, query: bytes, head: Head, island: int, body: bytes,
    cut_off: bool,
) -> None:  # fmt: skip
    headers = head.of(island, body)
    harness.check(
        HUBS[kind](), method, path, query=query, headers=headers, pieces=[body[:3], body[3:]], cut_off=cut_off
    )


@st.composite
def altered(draw: st.DrawFn) -> tuple[str, str, bytes]:
    """A right message with something in it replaced, removed or added."""
    method, path = draw(st.sampled_from(sorted(MESSAGES)))
    whole = json.loads(json.dumps(MESSAGES[method, path]))
    for _ in range(draw(st.integers(0, 2))):
        place: Any = whole
        while True:
            keys = sorted(place) if isinstance(place, dict) else list(range(len(place)))
            if not keys:
                break
            key = draw(st.sampled_from(keys))
            if isinstance(place[key], dict | list) and draw(st.booleans()):
                place = place[key]
                continue
            what = draw(st.sampled_from(["replace", "remove", "add"]))
            if what == "replace":
                place[key] = draw(VALUES)
            elif what == "remove":
                del place[key]
            elif isinstance(place, dict):
                place[draw(TEXTS)] = draw(VALUES)
            break
    return method, path, json.dumps(whole).encode()


@settings(EXAMPLES, max_examples=600)
@given(kind=st.sampled_from(sorted(HUBS)), what=altered(), island=st.integers(0, 2))
def test_messages_that_are_nearly_right(
    harness: Harness, kind: str, what: tuple[str, str, bytes], island: int
) -> None:
    method, path, body = what
    harness.check(HUBS[kind](), method, path, headers=RIGHT.of(island, body), pieces=[body])


@EXAMPLES
@given(
    kind=st.sampled_from(["founding", "busy"]),
    target=st.sampled_from(["/slots/1/payload", "/state/anchor.0", "/state/anchor.1"]),
    island=st.integers(0, 2), offset=st.integers(0, 40), size=st.integers(0, 40), of=st.sampled_from([32, 20, 33]),
    head=HEADS, cut_off=st.booleans(),
)  # fmt: skip
def test_chunks_that_are_nearly_right(
    harness: Harness, kind: str, target: str, island: int, offset: int, size: int, of: int, head: Head,
    cut_off: bool,
) -> None:  # fmt: skip
    body = bytes(range(size))
    query = f"offset={offset}&of={of}".encode()
    headers = head.of(island, body)
    harness.check(HUBS[kind](), "PUT", target, query=query, headers=headers, pieces=[body], cut_off=cut_off)


# ---- some by name --------------------------------------------------------------------------------------------------


def payload() -> bytes:
    return delta_of(1, 1, SIZES[1]).view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize(
    "changed, status, reason",
    [
        ({"checksum": b"0" * 16}, 400, "does not match its checksum"),
        ({"run": b"other"}, 409, "this hub serves run"),
        ({"incarnation": b"b"}, 401, "incarnation b, has not joined"),
        ({"island": b"2"}, 401, "island 2 has not been admitted"),
        ({"length": b"33"}, 400, "lie outside of 32"),
        ({"length": b"31"}, 400, "has not the 31 bytes that it says"),
        ({"length": str(CHUNK_LIMIT + 1).encode()}, 400, "at most"),
        ({"length": b""}, 400, "the length of the body"),
    ],
)
def test_a_chunk_is_refused_with_its_reason(
    harness: Harness, changed: dict[str, bytes], status: int, reason: str
) -> None:
    names = ("run", "island", "incarnation", "length", "checksum")
    head = Head(**{name: changed.get(name) for name in names})
    answer = harness.check(
        a_busy_hub(), "PUT", "/slots/1/payload", query=b"offset=0&of=32", headers=head.of(1, payload()),
        pieces=[payload()],
    )  # fmt: skip
    assert answer.status == status and reason in json.loads(answer.body)["error"]


def test_the_same_chunk_is_taken_when_it_is_right(harness: Harness) -> None:
    hub = a_busy_hub()
    answer = harness.check(
        hub, "PUT", "/slots/1/payload", query=b"offset=0&of=32", headers=RIGHT.of(1, payload()), pieces=[payload()]
    )  # fmt: skip
    assert answer.status == 200 and hub.records[1].status == "committed"


HEADER, HELLO = MESSAGES["POST", "/slots/1/header"], MESSAGES["POST", "/join"]


@pytest.mark.parametrize(
    "kind, path, message, reason",
    [
        ("busy", "/slots/1/header", HEADER | {"tokens": 10**400}, "tokens is"),
        ("busy", "/slots/1/header", HEADER | {"steps": -1}, "steps is -1"),
        ("busy", "/slots/1/header", HEADER | {"holds": {"\ud800": "0-9"}}, "no JSON"),
        ("busy", "/slots/1/header", HEADER | {"island": 0}, "the header is island 0's"),
        ("busy", "/slots/2001/header", HEADER | {"slot": 2001}, "the run has 2001 slots"),
        ("busy", f"/slots/{'9' * 5000}/header", HEADER, "the slot is"),
        ("busy", "/join", HELLO | {"started": float("inf")}, "Infinity is no JSON"),
        ("busy", "/beat", {"step": 1, "slot": 10**400, "idle_s": 0.0}, "slot is"),
        ("busy", "/leave", {"reason": "\udfff"}, "no JSON"),
        (
            "busy",
            "/beat",
            {"step": 1, "slot": 1, "idle_s": 0.0, "x": json.loads("[" * 40 + "]" * 40)},
            "levels",
        ),
    ],
)
def test_messages_that_would_break_something(
    harness: Harness, kind: str, path: str, message: Any, reason: str
) -> None:
    body = json.dumps(message).encode()
    answer = harness.check(HUBS[kind](), "POST", path, headers=RIGHT.of(1, body), pieces=[body])
    assert answer.status >= 400 and reason in json.loads(answer.body)["error"]


@pytest.mark.parametrize("field", ["island", "length"])
@pytest.mark.parametrize("value", [b"\xb2", b"9" * 5000, b"-1", b"1_0", b" 1"])
def test_numbers_in_headers_are_plain_digits(harness: Harness, field: str, value: bytes) -> None:
    names = ("run", "island", "incarnation", "length", "checksum")
    head = Head(**{name: value if name == field else None for name in names})
    body = json.dumps(MESSAGES["POST", "/beat"]).encode()
    answer = harness.check(a_busy_hub(), "POST", "/beat", headers=head.of(1, body), pieces=[body])
    assert answer.status == 400


def test_who_brings_more_than_the_memory_holds_leaves_no_trace(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    def exhausted(*_: Any) -> None:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr("torchtitan_diloco.hub.upload.buffers.empty", exhausted)
    body = json.dumps(HELLO | {"terms": terms_of(1).to_json()}).encode()
    answer = harness.check(a_hub(), "POST", "/join", headers=RIGHT.of(1, body), pieces=[body])
    assert answer.status == 409 and "no memory for 20 bytes" in json.loads(answer.body)["error"]
