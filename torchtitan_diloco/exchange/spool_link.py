"""Requests to the hub through files: what ``HubLink`` is over HTTP, with one round trip of the mirror where that has many.

It answers by itself what the hub would say anyway: that a header is heard and its payload wanted, that a state it has sent
along can be had. So a slot is one message up, header and payload, and one down, outcome and result.
"""

import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from torchtitan_diloco.errors import UserError
from torchtitan_diloco.exchange.chunks import Unreachable
from torchtitan_diloco.hub.refusal import Refusal
from torchtitan_diloco.hub.spool_files import NOTE, Damaged, Inbox, Message, Name, Outbox, folders, read_into
from torchtitan_diloco.hub.upload import Upload
from torchtitan_diloco.outer.policy import Member

ASK_S = 2.0  # how long a question waits for its answer before it says that there is none yet
LOOK_S = 0.25  # between two looks at the folder
NOTES_S = 10.0  # between two signs of life

Answer = dict[str, Any]


@dataclass(slots=True)
class Request:
    """What was asked. sent: its message is complete. lost: it, or the answer, was damaged here and has to be said again."""

    kind: str
    sequence: int
    body: dict[str, Any]
    parts: dict[str, dict[str, Any]] = field(default_factory=dict)
    sent: bool = False
    lost: bool = False
    answer: Message | None = None


class SpoolLink:
    """started: epoch seconds of this incarnation. holds: describes the state of this island, as ``OuterState.describe``."""

    def __init__(
        self, spool: Path, run_id: str, member: Member, started: float, holds: Callable[[], Mapping[str, Any]],
        notes_s: float = NOTES_S,
    ) -> None:  # fmt: skip
        """Raises UserError when the folder cannot be written."""
        self.url = str(spool)
        self._member, self._started, self._holds, self._notes_s = member, started, holds, notes_s
        up, down, refused = folders(spool, run_id)
        example = Name("note", member, 0, 64 * "0", "json")
        if Name.parse(str(example)) is None:
            raise UserError(f"incarnation {member.incarnation!r} cannot be part of a file's name")
        try:
            self._outbox = Outbox(up)
            self._inbox = Inbox(down, refused, lambda name: name.member.island == member.island)
            self._outbox.sweep(lambda name: name.member.island == member.island)
        except OSError as error:
            raise UserError(f"transport.dir: {spool} cannot be written: {error.strerror}") from None
        self._lock = threading.RLock()
        self._requests: dict[str, Request] = {}
        self._brought: dict[str, dict[str, Any]] = {}  # parts of the join to come
        self._brought_as = -1  # its sequence number
        self._offer: Message | None = None  # the hub's state, sent along with an answer
        self._fresh = False  # nobody has asked for it yet
        self._whole = False  # what has come along was not enough
        self._admission: dict[str, Any] = {}
        self._results: dict[int, Message] = {}
        self._read: set[str] = set()
        self._sequence = 0
        self._joined_as = -1  # sequence of the last join: notes about what was before it do not count
        self._why, self._stranger = "", ""
        self._note_seen = -1
        self._beat_body: Any = {"step": 0, "slot": 0, "idle_s": 0.0}
        self._noted_at, self._looked_at = float("-inf"), float("-inf")

    def close(self) -> None:
        """Nothing is held open."""

    # ---- as HubLink ------------------------------------------------------------------------------------------------

    def ask(self, method: str, path: str, body: Any = None, *, wait_s: float = 0.0, **query: int) -> Answer:
        """The answer to a message. wait_s: how long it may take on purpose. Raises Unreachable or Refusal."""
        what = path.strip("/").split("/")
        try:
            if what[0] == "slots":
                slot = int(what[1])
                if what[2] == "header":
                    return self._header(slot, body)
                return self._outcome(slot, wait_s) if what[2] == "outcome" else self._withdraw(slot)
            calls = {"join": self._join, "admit": self._admit, "beat": self._beat, "leave": self._leave}
            return self._state() if what[0] == "state" else calls[what[0]](body)
        except (OSError, Damaged) as error:
            raise Unreachable(f"{self.url}: {error}") from error

    def beat(self, body: Any) -> Answer:
        """As ``ask``: a file is not lost on the way."""
        return self.ask("POST", "/beat", body)

    def put(
        self, path: str, data: torch.Tensor, ranges: Iterable[tuple[int, int]], moved: Callable[[int], None], **query: int
    ) -> None:  # fmt: skip
        """Send the bytes, all of them whatever the ranges. Raises Unreachable."""
        what = path.strip("/").split("/")
        values = data.numpy().data
        try:
            if what[0] == "state":
                if self._brought_as < 0:
                    self._brought_as = self._next()
                self._brought[what[1]] = self._outbox.part("join", self._member, self._brought_as, values)
                return
            request = self._requests.get(f"slot-{what[1]}")
            if request is None:
                raise Unreachable(f"the header of slot {what[1]} is no longer held")
            part = self._outbox.part(request.kind, self._member, request.sequence, values)
            self._send(request, {"payload": part})
        except OSError as error:
            raise Unreachable(f"{self.url}: {error}") from error
        moved(data.numel())

    def get(self, path: str, into: Upload, moved: Callable[[int], None]) -> None:
        """Fill it. Raises Unreachable."""
        what = path.strip("/").split("/")
        state = what[0] == "state"
        message = self._offer if state else self._results.get(int(what[1]))
        part = message.parts.get(what[2] if state else "result") if message is not None else None
        try:
            if part is None:
                raise Unreachable(f"{path} has not come along")
            read_into(part, into.data.numpy().data)
        except (OSError, Damaged, Unreachable) as error:
            if state:
                self._offer, self._whole = None, True
            elif message is not None:
                self._results.pop(int(what[1]))
                self._done(message)
            raise error if isinstance(error, Unreachable) else Unreachable(f"{path}: {error}") from error
        into.add(0, into.nbytes)
        moved(into.nbytes)
        if not state and message is not None:
            self._results.pop(int(what[1]))
            self._done(message)

    # ---- coming and going ------------------------------------------------------------------------------------------

    def _join(self, body: dict[str, Any]) -> Answer:
        with self._lock:
            request = self._requests.get("join")
            if request is None or request.lost or request.body != body:
                if request is not None:
                    self._drop("join")
                    self._brought, self._brought_as = {}, -1
                sequence = self._brought_as if self._brought else self._next()
                request = self._requests["join"] = Request("join", sequence, body)
                self._joined_as = max(self._joined_as, sequence)
                self._send(request, self._brought)
        message = self._await(request, ASK_S)
        if message is None:
            return {"status": "wait", "why": self._why or "the hub's answer, by way of the spool"}
        with self._lock:
            self._brought, self._brought_as = {}, -1
            answer = self._consume("join", message)
            self._stranger = ""
            if answer["status"] == "take":
                self._keep(message)
            return answer

    def _admit(self, body: dict[str, Any]) -> Answer:
        """The hub knows what it has offered: whether it takes this island is seen at the first slot."""
        with self._lock:
            if self._offer is None:
                raise Unreachable("the state of the run is no longer held")
            offer = offered(self._offer)
            self._admission = {"slot": body["slot"]}
            self._send(Request("admit", self._next(), self._admission))
            return {"step": offer["step"], "present": sorted({*offer["present"], self._member.island})}

    def _leave(self, body: dict[str, Any]) -> Answer:
        with self._lock:
            self._drop(*self._requests)
            self._send(Request("leave", self._next(), body))
        return {}

    def _beat(self, body: dict[str, Any]) -> Answer:
        with self._lock:
            self._beat_body = body
            self._look()
            if time.monotonic() - self._noted_at >= self._notes_s:
                self._note()
            if self._stranger:
                raise Refusal("stranger", self._stranger)
        return {"member": True}

    def _note(self) -> None:
        """A sign of life, with what was read and what has come damaged. It replaces the one before."""
        self._read &= self._inbox.listed
        sequence = self._next()
        body = {"beat": self._beat_body, "read": sorted(self._read), "refused": self._inbox.refused}
        self._outbox.send(NOTE, self._member, sequence, self._started, body)
        self._outbox.remove(lambda n: n.kind == NOTE and n.member == self._member and n.sequence < sequence)
        self._noted_at = time.monotonic()

    # ---- state -----------------------------------------------------------------------------------------------------

    def _state(self) -> Answer:
        """The one that has come along, if nobody has asked for that yet; else the hub is asked."""
        with self._lock:
            if self._offer is not None and self._fresh:
                self._fresh = False
                return offered(self._offer)
            request = self._requests.get("state")
            if request is None or request.lost:
                self._drop("state")
                body = {"holds": None if self._whole else self._holds()}
                request = self._requests["state"] = Request("state", self._next(), body)
                self._send(request)
        message = self._await(request, ASK_S)
        if message is None:
            raise Unreachable("the run's state is on its way")
        with self._lock:
            answer = self._consume("state", message)
            self._keep(message)
            self._fresh = self._whole = False
            return answer

    def _keep(self, message: Message) -> None:
        """Until the next one, the state can be read from this message."""
        if self._offer is not None and self._offer is not message:
            self._done(self._offer)
        self._offer, self._fresh = message, True

    # ---- slots -----------------------------------------------------------------------------------------------------

    def _header(self, slot: int, header: dict[str, Any]) -> Answer:
        with self._lock:
            kind = f"slot-{slot}"
            if self._offer is not None and not self._fresh:
                self._done(self._offer)
                self._offer = None
            request = self._requests.get(kind)
            if request is None or request.lost or request.body["header"] != header:
                self._drop(kind)
                body = {"header": header, "admit": self._admission, "holds": self._holds()}
                request = self._requests[kind] = Request(kind, self._next(), body)
            if not request.sent and not (header["finite"] and header["steps"] > 0):
                self._send(request)
            return self._open([] if request.sent else [(0, 0)])

    def _outcome(self, slot: int, wait_s: float) -> Answer:
        kind = f"slot-{slot}"
        with self._lock:
            request = self._requests.get(kind)
        if request is None:
            return {"status": "unknown"}
        message = self._await(request, wait_s)
        with self._lock:
            if request.lost:
                self._drop(kind)
                return {"status": "unknown"}
            if message is None:
                return self._open([])
            answer = self._consume(kind, message)
            if "result" in message.parts:
                self._results[slot] = message
            elif "offer" in message.body:
                self._keep(message)
            else:
                self._done(message)
            return answer

    def _withdraw(self, slot: int) -> Answer:
        kind, withdrawal = f"slot-{slot}", f"withdraw-{slot}"
        with self._lock:
            contribution = self._requests.get(kind)
            if contribution is None or not contribution.sent:
                self._drop(kind)
                return {"status": "unknown"}
            request = self._requests.get(withdrawal)
            if request is None or request.lost:
                self._drop(withdrawal)
                request = self._requests[withdrawal] = Request(withdrawal, self._next(), {})
                self._send(request)
        message = self._await(request, ASK_S)
        if contribution.answer is not None:
            self._drop(withdrawal)
            return self._outcome(slot, 0.0)
        if message is None:
            raise Unreachable(f"the hub's answer to the withdrawal from slot {slot} is on its way")
        with self._lock:
            answer = self._consume(withdrawal, message)
            self._done(message)
            if answer["status"] == "open":
                return self._open([])
            if answer["status"] == "withdrawn":
                self._drop(kind)
                return answer
        return self._open([])  # its outcome comes with the answer to the contribution

    @staticmethod
    def _open(missing: list[tuple[int, int]]) -> Answer:
        return {"status": "open", "phase": "by way of the spool, outcome", "islands": [], "missing": missing}

    # ---- files -----------------------------------------------------------------------------------------------------

    def _next(self) -> int:
        with self._lock:
            self._sequence += 1
            return self._sequence

    def _send(self, request: Request, parts: Mapping[str, dict[str, Any]] | None = None) -> None:
        request.parts = dict(parts or {})
        self._outbox.send(
            request.kind, self._member, request.sequence, self._started, request.body, request.parts
        )
        request.sent = True

    def _await(self, request: Request, seconds: float) -> Message | None:
        deadline = time.monotonic() + seconds
        while True:
            with self._lock:
                self._look()
                if request.answer is not None or request.lost or time.monotonic() >= deadline:
                    return request.answer
            time.sleep(min(LOOK_S, max(0.0, deadline - time.monotonic())))

    def _consume(self, kind: str, message: Message) -> Answer:
        """The request is over. Raises Refusal."""
        sequence = message.name.sequence
        self._drop(kind)
        refusal = message.body.get("refusal")
        if refusal is not None:
            self._done(message)
            if refusal["kind"] == "stranger" and sequence > self._joined_as:
                self._stranger = str(refusal["error"])
            raise Refusal(refusal["kind"], str(refusal["error"]))
        return dict(message.body["reply"])

    def _drop(self, *kinds: str) -> None:
        for kind in kinds:
            request = self._requests.pop(kind, None)
            if request is not None:
                self._delete(request.sequence)

    def _delete(self, sequence: int) -> None:
        self._outbox.remove(lambda n: (n.member, n.sequence) == (self._member, sequence))

    def _done(self, message: Message) -> None:
        self._read.add(str(message.name))

    def _look(self) -> None:
        if time.monotonic() - self._looked_at < LOOK_S:
            return
        for message in self._inbox.scan():
            name = message.name
            if name.member != self._member:
                if message.started < self._started:
                    self._done(message)
                continue
            if name.kind == NOTE:
                if name.sequence > self._note_seen:
                    self._note_seen = name.sequence
                    self._take_note(message.body)
                continue
            request = self._requests.get(name.kind)
            if request is None or request.sequence != name.sequence or request.answer is not None:
                self._done(message)  # an answer to what nobody asks any more
            else:
                request.answer = message
        self._looked_at = time.monotonic()
        if self._inbox.refused and self._looked_at - self._noted_at >= self._notes_s:
            self._note()

    def _take_note(self, note: Mapping[str, Any]) -> None:
        read, refused = set(note["read"]), {n for n in note["refused"] if not self._outbox.intact(n)}
        self._outbox.collect(self._member.island, read)
        for name in map(Name.parse, refused):
            for request in self._requests.values():
                if name is not None and (name.member, name.sequence) == (self._member, request.sequence):
                    request.lost = request.sent
        self._why = str(note["why"])
        if note["stranger"] and note["noted"] > self._joined_as:
            self._stranger = str(note["stranger"])


def offered(message: Message) -> Answer:
    """What GET /state says, from an answer that brings a state."""
    return dict(message.body.get("offer") or message.body["reply"])
