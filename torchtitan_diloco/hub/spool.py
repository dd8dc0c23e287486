"""The hub's end of a spool: files of islands that reach nothing become requests to the service, its answers become files.

Every check and every refusal is the service's own: it is called as islands call it over HTTP, in its event loop. What a
file round trip must not cost twice comes together: a contribution is header and payload in one message, its answer is the
slot's outcome with the result, or with the state that the island lacks.

A request stays in the island's folder until its answer is there, so a hub that was started anew finds it again.
"""

import asyncio
import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import torch
import xxhash

from torchtitan_diloco.errors import UserError
from torchtitan_diloco.hub.access import SPOOL
from torchtitan_diloco.hub.bulk import CHECKSUM
from torchtitan_diloco.hub.refusal import Refusal
from torchtitan_diloco.hub.service import INCARNATION, ISLAND, RUN, STATUS, Service
from torchtitan_diloco.hub.spool_files import (
    NOTE,
    PIECE,
    Damaged,
    Inbox,
    Message,
    Name,
    Outbox,
    folders,
    read_into,
)
from torchtitan_diloco.outer import buffers
from torchtitan_diloco.outer.policy import Member

logger = logging.getLogger(__name__)

PAUSE_S = 0.25  # between two looks at the folder
NOTES_S = 1.0  # between two notes to an island


@dataclass(slots=True)
class Sender:
    """An island by its newest incarnation.

    pending: requests that have no answer yet. announced: those of slots that the hub has heard of. done: files that get no
    answer. why: what its join waits for. stranger: why it is not in the run; noted: the number of its newest note.
    said: in the hub's last note to it.
    """

    member: Member
    started: float
    pending: dict[str, Message] = field(default_factory=dict)
    announced: set[str] = field(default_factory=set)
    done: set[str] = field(default_factory=set)
    why: str = ""
    stranger: str = ""
    noted: int = -1
    said: dict[str, Any] = field(default_factory=dict)
    said_at: float = 0.0


class SpoolReader:
    """lease_s: silence after which an island of this spool is gone. broken: is told what makes it impossible to go on."""

    def __init__(
        self, spool: Path, service: Service, run_id: str, lease_s: float, broken: Callable[[BaseException], None]
    ) -> None:  # fmt: skip
        """Raises UserError when the folder cannot be written."""
        self._spool, self._hub, self._run_id, self._lease_s = spool, service.hub, run_id, lease_s
        self._broken = broken
        up, down, refused = folders(spool, run_id)
        try:
            self._inbox, self._outbox = Inbox(up, refused), Outbox(down)
            self._outbox.sweep(lambda name: True)
        except OSError as error:
            raise UserError(f"syncer.spools: {spool} cannot be written: {error.strerror}") from None
        transport = httpx.ASGITransport(service.app, raise_app_exceptions=False, client=(SPOOL, 0))
        self._client = httpx.AsyncClient(transport=transport, base_url="http://hub", headers={RUN: run_id})
        self._senders: dict[int, Sender] = {}
        self._sequence = 0
        self._complained: set[str] = set()

    async def run(self) -> None:
        try:
            while True:
                try:
                    await self.turn()
                except OSError as error:
                    logger.warning("the spool %s: %s", self._spool, error)
                await asyncio.sleep(PAUSE_S)
        except Exception as error:  # noqa: BLE001 - the hub must not go on without it
            self._broken(error)

    async def turn(self) -> None:
        """Take what has come, and answer what can be answered. Raises OSError."""
        for message in await asyncio.to_thread(self._inbox.scan):
            await self._take(message)
        for sender in list(self._senders.values()):
            for name, message in sorted(sender.pending.items(), key=lambda item: item[1].name.sequence):
                if name not in self._inbox.listed:
                    del sender.pending[name]  # the island does not ask any more
                    await self._give_up(message)
                elif await self._handle(sender, message):
                    sender.pending.pop(name, None)
            self._let_go(sender)
            await self._note(sender)

    async def _take(self, message: Message) -> None:
        sender = self._senders.get(message.member.island)
        if sender is None or message.started > sender.started:
            fresh = Sender(message.member, message.started)
            if sender is not None:
                fresh.done = sender.done | set(sender.pending)
            sender = self._senders[message.member.island] = fresh
        name = message.name
        if name.member != sender.member:
            sender.done.add(str(name))  # nobody waits for the answer
        elif name.kind != NOTE:
            sender.pending[str(name)] = message
        elif name.sequence > sender.noted:
            sender.noted = name.sequence
            await self._heard(sender, message)

    async def _heard(self, sender: Sender, note: Message) -> None:
        """A sign of life, with what the island has read and what has reached it damaged."""
        read, refused = (strings(note.body.get(key)) for key in ("read", "refused"))
        gone = {name for name in refused if not self._outbox.intact(name)}
        self._outbox.collect(sender.member.island, read)
        broken = {n.sequence for n in map(Name.parse, gone) if n is not None and n.member == sender.member}
        self._outbox.remove(lambda n: n.member == sender.member and n.sequence in broken)
        for sequence in broken:
            self._inbox.again(sender.member, sequence)
        try:
            await self._ask(sender.member, "POST", "/beat", note.body.get("beat"))
            sender.stranger = ""
        except Refusal as refusal:
            if refusal.kind == "stranger":
                sender.stranger = str(refusal)
        except Unanswered as error:
            logger.warning("%s: %s", note.name, error)

    async def _handle(self, sender: Sender, message: Message) -> bool:
        """Whether the request is done with."""
        kind, _, number = message.name.kind.partition("-")
        handlers = {
            "join": self._join, "admit": self._admit, "state": self._state, "slot": self._slot,
            "withdraw": self._withdraw, "leave": self._leave,
        }  # fmt: skip
        handle = handlers.get(kind)
        if handle is None:
            sender.done.add(str(message.name))
            return True
        try:
            return await handle(sender, message, int(number or 0))
        except Refusal as refusal:
            await self._give_up(message)
            await self._answer(message, {"refusal": {"kind": refusal.kind, "error": str(refusal)}})
            return True
        except Unanswered as error:
            if str(message.name) not in self._complained:
                self._complained = {*self._complained, str(message.name)} & self._inbox.listed
                logger.warning("%s: %s", message.name, error)
            return False
        except (FileNotFoundError, Damaged) as error:
            logger.info("%s goes while it is read: %s", message.name, error)
            await self._give_up(message)
            return True

    async def _give_up(self, message: Message) -> None:
        """A contribution that is announced and will not come: nobody waits for it."""
        if message.name.kind.startswith("slot-"):
            try:
                await self._ask(message.member, "POST", f"/slots/{message.name.kind[5:]}/withdraw")
            except (Refusal, Unanswered) as error:
                logger.debug("%s: %s", message.name, error)

    # ---- requests --------------------------------------------------------------------------------------------------

    async def _join(self, sender: Sender, message: Message, _: int) -> bool:
        holder = self._hub.seats.holder(message.member.island)
        if holder is not None and holder.started < message.started and holder.lease_s is not None:
            # An earlier start, whose lease is longer than anybody would want to wait for it to run out.
            self._hub.leave(holder.member, "failure")
        for label, path in message.parts.items():
            try:
                await self._put(message.member, f"/state/{label}", path, [(0, path.stat().st_size)])
            except Refusal as refusal:
                logger.info("%s: %s", message.name, refusal)  # it is asked for them again, then
        reply = await self._ask(message.member, "POST", "/join", message.body)
        self._hub.seats[message.member].lease_s = self._lease_s
        sender.stranger = ""
        sender.why = str(reply.get("why", ""))
        if reply["status"] == "wait":
            return False
        if reply["status"] == "take":
            await self._answer(message, {"reply": reply}, self._lacking(reply, message.body.get("state")))
        else:
            await self._answer(message, {"reply": reply})
        return True

    async def _admit(self, sender: Sender, message: Message, _: int) -> bool:
        """Nobody waits for an answer: whether the island is in, it learns with its first slot."""
        sender.done.add(str(message.name))
        try:
            await self._ask(message.member, "POST", "/admit", message.body)
        except Refusal as refusal:
            logger.info("%s: %s", message.name, refusal)
        return True

    async def _state(self, sender: Sender, message: Message, _: int) -> bool:
        reply = await self._ask(message.member, "GET", "/state")
        await self._answer(message, {"reply": reply}, self._lacking(reply, message.body.get("holds")))
        return True

    async def _slot(self, sender: Sender, message: Message, slot: int) -> bool:
        """Header and payload together. The answer is how the slot ended."""
        member, body, name = message.member, message.body, str(message.name)
        path = message.parts.get("payload")
        reply: dict[str, Any] = {"status": "unknown"}
        if name in sender.announced:
            reply = await self._ask(member, "GET", f"/slots/{slot}/outcome", wait=0)
        if reply["status"] == "unknown":
            try:
                reply = await self._ask(member, "POST", f"/slots/{slot}/header", body.get("header"))
            except Refusal as refusal:
                if refusal.kind != "stranger" or not body.get("admit"):
                    raise
                await self._ask(
                    member, "POST", "/admit", body["admit"]
                )  # on its way as well, but not here yet
                return False
            sender.announced = {*sender.announced, name} & self._inbox.listed
        if reply["status"] == "open":
            if reply["missing"] and path is None:
                raise Refusal("malformed", f"the message has no payload for slot {slot}")
            if reply["missing"] and path is not None:
                await self._put(
                    member, f"/slots/{slot}/payload", path, reply["missing"], of=path.stat().st_size
                )
            return False
        parts: dict[str, torch.Tensor] = {}
        if reply["status"] == "committed":
            try:
                parts = {"result": self._hub.payload(member, slot)}
            except Refusal as refusal:
                reply = {"status": "behind", "reason": str(refusal)}
        content: dict[str, Any] = {"reply": reply}
        if reply["status"] == "behind":
            offer = content["offer"] = await self._ask(member, "GET", "/state")
            parts = self._lacking(offer, body.get("holds"))
        await self._answer(message, content, parts)
        return True

    async def _withdraw(self, sender: Sender, message: Message, slot: int) -> bool:
        reply = await self._ask(message.member, "POST", f"/slots/{slot}/withdraw")
        await self._answer(message, {"reply": reply})
        return True

    async def _leave(self, sender: Sender, message: Message, _: int) -> bool:
        sender.done.add(str(message.name))
        try:
            await self._ask(message.member, "POST", "/leave", message.body)
        except Refusal as refusal:
            logger.info("%s: %s", message.name, refusal)
        self._outbox.remove(lambda n: n.member == message.member and n.kind != NOTE)
        return True

    def _lacking(self, offer: Mapping[str, Any], holds: Any) -> dict[str, torch.Tensor]:
        """The tensors of a state, as far as the island does not say that it holds the very same."""
        has = holds.get("fragments") if isinstance(holds, dict) else None
        known = has if isinstance(has, list) else []
        parts = {}
        for name in offer["tensors"]:
            fragment = int(name.rpartition(".")[2])
            if fragment >= len(known) or known[fragment] != offer["state"]["fragments"][fragment]:
                parts[name] = self._hub.shelf.tensor(offer["key"], name)
        return parts

    def _let_go(self, sender: Sender) -> None:
        """Results are kept for an island until its published state has them; to this one they are on their way."""
        holder = self._hub.seats.holder(sender.member.island)
        if holder is None or holder.member != sender.member or self._hub.state is None:
            return
        slots = [int(m.name.kind[5:]) for m in sender.pending.values() if m.name.kind.startswith("slot-")]
        holder.slot = max(holder.slot, min([self._hub.state.slot, *slots]))

    # ---- files -----------------------------------------------------------------------------------------------------

    async def _answer(
        self, to: Message, body: Mapping[str, Any], parts: Mapping[str, torch.Tensor] | None = None
    ) -> None:
        name = to.name

        def write() -> None:
            written = {
                label: self._outbox.part(
                    name.kind, name.member, name.sequence, data.view(torch.uint8).numpy().data
                )
                for label, data in (parts or {}).items()
            }
            self._outbox.send(name.kind, name.member, name.sequence, to.started, body, written)

        await asyncio.to_thread(write)

    async def _note(self, sender: Sender) -> None:
        """What an island cannot learn from answers; only what is new is said."""
        sender.done &= self._inbox.listed
        refused = [
            n for n in map(Name.parse, self._inbox.refused) if n and n.member.island == sender.member.island
        ]
        note = {
            "read": sorted(sender.done),
            "refused": sorted(map(str, refused)),
            "why": sender.why,
            "stranger": sender.stranger,
            "noted": sender.noted if sender.stranger else -1,
        }
        if note == sender.said or time.monotonic() - sender.said_at < NOTES_S:
            return
        self._sequence = max(
            self._sequence + 1, int(time.time() * 1000)
        )  # later than those of an earlier hub
        sequence, member = self._sequence, sender.member

        def write() -> None:
            self._outbox.send(NOTE, member, sequence, sender.started, note)
            self._outbox.remove(
                lambda n: n.kind == NOTE and n.member.island == member.island and n.sequence != sequence
            )

        await asyncio.to_thread(write)
        sender.said, sender.said_at = note, time.monotonic()

    # ---- the service -----------------------------------------------------------------------------------------------

    async def _put(
        self, member: Member, path: str, file: Path, ranges: Sequence[Sequence[int]], **query: int
    ) -> None:
        """Raises Refusal, Damaged or OSError."""
        data = buffers.empty(file.stat().st_size, torch.uint8)
        values = data.numpy().data
        await asyncio.to_thread(read_into, file, values)
        for start, stop in ranges:
            for at in range(start, min(stop, len(values)), PIECE):
                chunk = values[at : min(at + PIECE, stop)]
                headers = {CHECKSUM: xxhash.xxh3_64_hexdigest(chunk)}
                await self._send(member, "PUT", path, {"offset": at, **query}, headers, chunk.tobytes())

    async def _ask(
        self, member: Member, method: str, path: str, body: Any = None, **query: int
    ) -> dict[str, Any]:
        """Raises Refusal, Unanswered."""
        try:
            content = None if method == "GET" else json.dumps({} if body is None else body).encode()
        except RecursionError:
            raise Refusal("malformed", "the message is nested too deeply") from None
        return dict((await self._send(member, method, path, query, {}, content)).json())

    async def _send(
        self, member: Member, method: str, path: str, query: dict[str, int], headers: dict[str, str], content: bytes | None
    ) -> httpx.Response:  # fmt: skip
        who = {ISLAND: str(member.island), INCARNATION: member.incarnation}
        response = await self._client.request(
            method, path, params=query, headers=who | headers, content=content
        )
        if response.is_success:
            return response
        if response.status_code in (404, 405):
            raise Refusal("malformed", f"there is no {method} {path}")
        if response.status_code not in STATUS.values():
            raise Unanswered(f"{method} {path} answers {response.status_code}: {response.text[:200]}")
        try:
            answer = response.json()
            raise Refusal(answer["kind"], str(answer["error"]))
        except (ValueError, KeyError, TypeError):
            raise Unanswered(f"{method} {path} answers {response.status_code}") from None


class Unanswered(Exception):
    """The service has stopped, or has failed on a request."""


def strings(value: Any) -> set[str]:
    return {item for item in value if isinstance(item, str)} if isinstance(value, list) else set()
