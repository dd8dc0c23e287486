"""A worker of a hub: it receives, merges, keeps and serves tensors as the coordinator says, and decides nothing.

Islands PUT and GET /parts/KEY, with the tokens that they have for the hub; the rest is the coordinator's, with a secret of
the workers. All of it may be said twice. A worker serves one start of one coordinator at a time: that with the highest
epoch, for which it forgets whatever it held for the one before.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from torchtitan_diloco.hub.access import ISLANDS, Access
from torchtitan_diloco.hub.bulk import body_of, chunk_of, problem, take_chunk
from torchtitan_diloco.hub.dial import EPOCH, ISLAND, RUN
from torchtitan_diloco.hub.parts import Parts
from torchtitan_diloco.hub.refusal import Busy, Refusal
from torchtitan_diloco.hub.service import MESSAGE_LIMIT, STATUS, member_of
from torchtitan_diloco.hub.slot import Job
from torchtitan_diloco.hub.terms import Terms
from torchtitan_diloco.hub.tokens import digest as hashed
from torchtitan_diloco.hub.upload import Upload
from torchtitan_diloco.hub.wellformed import message
from torchtitan_diloco.outer.digest import digest
from torchtitan_diloco.outer.merge import Contribution
from torchtitan_diloco.outer.merger import Merger
from torchtitan_diloco.outer.policy import Member
from torchtitan_diloco.outer.state import FragmentState

logger = logging.getLogger(__name__)

COORDINATOR = "coordinator"
START = "x-diloco-start"
"""Of a coordinator: its epoch, and a word that no other start of one has."""
FENCED = 412
ANSWER_S = 10.0  # after which who has asked for some work is told to ask again
REMEMBERED = 64  # pieces of work whose result is kept for that

Handler = Callable[[Request], Awaitable[Response]]


@dataclass(slots=True)
class Arrival:
    """kind: "payload", which is merged and nothing else, or "anchor" or "momentum"."""

    upload: Upload
    kind: str
    member: Member


@dataclass(slots=True)
class Held:
    """All that a worker has for one start of a coordinator. tensors: those that islands may read, by key."""

    start: str
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    residuals: dict[str, torch.Tensor] = field(default_factory=dict)
    arrivals: dict[str, Arrival] = field(default_factory=dict)
    digests: dict[str, str] = field(default_factory=dict)
    read: set[str] = field(default_factory=set)
    serial: int = 0
    work: dict[str, asyncio.Task[dict[str, Any]]] = field(default_factory=dict)

    @property
    def epoch(self) -> int:
        return epoch_of(self.start)

    def drop(self, keys: list[str]) -> None:
        for key in keys:
            for held in (self.tensors, self.residuals, self.arrivals, self.digests):
                held.pop(key, None)

    def finish(self, key: str) -> None:
        """Of something that has arrived: it can be read, if it is not a payload."""
        arrival = self.arrivals[key]
        if arrival.kind != "payload" and arrival.upload.complete:
            self.tensors[key] = values = arrival.upload.values()
            self.digests[key] = digest(values) if arrival.kind == "anchor" else ""
            del self.arrivals[key]


class WorkerService:
    """The ASGI application. Merges run in one thread beside the event loop, files in another."""

    def __init__(self, run_id: str, folder: Path, secret: str, access: Access) -> None:
        """folder: for the files of its parts. secret: of the coordinator. access: of islands. Raises OSError."""
        self._run_id, self._access, self._parts = run_id, access, Parts(folder)
        self._coordinator = Access({COORDINATOR: hashed(secret)})
        self._held = Held("")
        self._merging = ThreadPoolExecutor(1, thread_name_prefix="merge")
        self._disk = ThreadPoolExecutor(1, thread_name_prefix="disk")
        self._settings: Mapping[str, Any] = {}
        self._terms: Terms | None = None
        self._merger: Merger | None = None
        self._one_merge = (
            asyncio.Lock()
        )  # a later start of the hub may ask for one while the last of the earlier goes on
        routes: list[tuple[str, str, Handler, Callable[[Request], None]]] = [
            ("PUT", "/parts/{key}", self._put, self._from_island),
            ("GET", "/parts/{key}", self._get, self._from_island),
            ("POST", "/worker/begin", self._begin, self._with_secret),
            ("POST", "/worker/sync", self._sync, self._from_coordinator),
            ("POST", "/worker/do", self._do, self._from_coordinator),
        ]
        self.app = Starlette(
            routes=[Route(path, partial(self._answer, call, may), methods=[how]) for how, path, call, may in routes]
        )  # fmt: skip

    # ---- every request ---------------------------------------------------------------------------------------------

    async def _answer(self, call: Handler, may: Callable[[Request], None], request: Request) -> Response:
        try:
            may(request)
            response = await call(request)
        except Superseded as error:
            response = problem(str(error), "refused", FENCED)
        except Unready as error:
            response = problem(str(error), "unready", 503)
        except Refusal as refusal:
            response = problem(str(refusal), refusal.kind, STATUS[refusal.kind])
            if isinstance(refusal, Busy):
                response.headers["retry-after"] = str(round(refusal.retry_s))
        except ClientDisconnect:
            response = problem("the request was cut off", "malformed", 400)
        response.headers[EPOCH] = str(max(0, self._held.epoch))
        return response

    def _from_island(self, request: Request) -> None:
        headers = request.headers
        self._access.check(ISLANDS, headers.get(ISLAND), headers.get("authorization"), peer_of(request))
        self._require_run(request)
        if not self._held.start:
            raise Unready("this worker waits for its coordinator")

    def _with_secret(self, request: Request) -> None:
        only = frozenset({COORDINATOR})
        self._coordinator.check(only, None, request.headers.get("authorization"), peer_of(request))
        self._require_run(request)

    def _from_coordinator(self, request: Request) -> None:
        self._with_secret(request)
        start = request.headers.get(START, "")
        if start != self._held.start:
            if epoch_of(start) <= self._held.epoch:
                raise Superseded(f"a later start of the hub, number {self._held.epoch}, has this worker")
            raise Refusal("stranger", "this worker was started anew, or serves an earlier start of the hub")

    def _require_run(self, request: Request) -> None:
        if request.headers.get(RUN) != self._run_id:
            raise Refusal("refused", f"this worker is one of run {self._run_id}")

    # ---- islands ---------------------------------------------------------------------------------------------------

    async def _put(self, request: Request) -> Response:
        key, member, held = request.path_params["key"], member_of(request), self._held

        def where() -> Upload:
            arrival = held.arrivals.get(key)
            if arrival is None or arrival.member != member or held is not self._held:
                raise Refusal("gone", f"nothing more of island {member.island} is asked for under {key}")
            return arrival.upload

        await take_chunk(request, where)
        if key in held.arrivals:
            held.finish(key)
        return JSONResponse({})

    async def _get(self, request: Request) -> Response:
        key = request.path_params["key"]
        member_of(request)
        tensor = self._held.tensors.get(key)
        if tensor is None:
            raise Refusal("gone", f"{key} is no longer held")
        self._held.read.add(key)
        return chunk_of(request, tensor.view(torch.uint8))

    # ---- the coordinator -------------------------------------------------------------------------------------------

    async def _begin(self, request: Request) -> Response:
        start = request.headers.get(START, "")
        if start != self._held.start:
            if epoch_of(start) <= self._held.epoch:
                raise Superseded(f"a later start of the hub, number {self._held.epoch}, has this worker")
            self._held = Held(start)
            logger.info("serving start %d of the hub", self._held.epoch)
        return JSONResponse({})

    async def _sync(self, request: Request) -> Response:
        """uploads: that are open and were incomplete as far as the coordinator knows. drop: keys that it does not need."""
        data, held = message(await body_of(request, MESSAGE_LIMIT)), self._held
        told: dict[str, dict[str, Any]] = {}
        if data["serial"] < held.serial:  # a copy that has come late; what it asks for may be let go already
            return JSONResponse({"uploads": {}, "read": []})
        held.serial = data["serial"]
        for key, nbytes, kind, island, incarnation in data["uploads"]:
            refused = ""
            if key not in held.arrivals and key not in held.tensors:
                try:
                    held.arrivals[key] = Arrival(Upload(nbytes), kind, Member(island, incarnation))
                except Refusal as refusal:
                    refused = str(refusal)
            missing = held.arrivals[key].upload.missing() if key in held.arrivals else []
            missing = [(0, nbytes)] if refused else missing
            told[key] = {"missing": missing, "digest": held.digests.get(key, ""), "refused": refused}
        held.drop(data["drop"])
        read, held.read = held.read, set()
        return JSONResponse({"uploads": told, "read": sorted(read)})

    async def _do(self, request: Request) -> Response:
        """What takes a while. Asked again by the same name, it goes on waiting for the same work."""
        data, held = message(await body_of(request, MESSAGE_LIMIT)), self._held
        work = held.work.get(data["work"])
        if work is None:
            work = held.work[data["work"]] = asyncio.create_task(self._work(held, data))
            finished = [name for name, task in held.work.items() if task.done()]
            for name in finished[: len(held.work) - REMEMBERED]:
                del held.work[name]
        await asyncio.wait({work}, timeout=ANSWER_S)
        return JSONResponse(work.result() if work.done() else {"wait": True})

    async def _work(self, held: Held, data: Mapping[str, Any]) -> dict[str, Any]:
        calls = {"merge": self._merge, "load": self._load, "write": self._write}
        loop, op = asyncio.get_running_loop(), data["op"]
        try:
            if op in calls:
                return await calls[op](held, data)
            files = data["files"]
            await loop.run_in_executor(
                self._disk, self._parts.keep if op == "keep" else self._parts.remove, files
            )
        except OSError as error:
            return {"disk": str(error)}
        except ValueError as error:
            return {"damaged": str(error)}
        except Exception as error:
            logger.exception("%s has failed", op)
            return {"broken": repr(error)}
        return {}

    async def _merge(self, held: Held, data: Mapping[str, Any]) -> dict[str, Any]:
        """By the code of a hub without workers, on named tensors; what comes out is held by new names."""
        async with self._one_merge:
            return await self._merge_alone(held, data)

    async def _merge_alone(self, held: Held, data: Mapping[str, Any]) -> dict[str, Any]:
        if data["terms"] != self._settings or self._terms is None or self._merger is None:
            self._terms = Terms.from_json(data["terms"])
            self._merger, self._settings = self._terms.merger(), data["terms"]
        merger, state, fragment, slot = self._merger, self._terms.blank(), data["fragment"], data["slot"]
        momentum = held.tensors[data["momentum"]] if data["momentum"] else None
        state.states[fragment] = FragmentState(held.tensors[data["anchor"]], momentum, 0, "")
        merger.restore({name: held.residuals[key] for name, key in data["residuals"].items()})
        # What is merged takes no more chunks: its memory may become that of the merged delta.
        contributions = [
            Contribution(island, steps, tokens, held.arrivals.pop(key).upload.data, spare=True)
            for island, steps, tokens, key in data["contributions"]
        ]
        job = Job(slot, fragment, contributions, merger, state.outer_step(fragment, slot))
        del contributions, momentum, state
        await asyncio.get_running_loop().run_in_executor(self._merging, job.run)
        merger.settle(fragment, slot, committed=True)
        advance, payload, made = job.advance, job.payload, data["made"]
        assert advance is not None and payload is not None
        held.tensors[f"{made}.payload"] = payload
        held.tensors[f"{made}.anchor"] = advance.anchor
        if advance.momentum is not None:
            held.tensors[f"{made}.momentum"] = advance.momentum
        residuals = merger.kept(fragment)
        merger.reset(fragment)
        held.residuals |= {f"{made}.{name}": kept for name, kept in residuals.items()}
        return {
            "weights": list(job.weights), "nbytes": payload.nbytes, "momentum": advance.momentum is not None,
            "digest": advance.digest, "merged": advance.merged, "finite": advance.finite,
            "residuals": {name: kept.numel() for name, kept in residuals.items()},
        }  # fmt: skip

    async def _load(self, held: Held, data: Mapping[str, Any]) -> dict[str, Any]:
        name, key = data["name"], data["key"]
        read = partial(self._parts.read, name, data["entry"])
        tensor = await asyncio.get_running_loop().run_in_executor(self._disk, read)
        (held.residuals if name.startswith("residual.") else held.tensors)[key] = tensor
        return {"numel": tensor.numel(), "digest": digest(tensor) if name.startswith("anchor.") else ""}

    async def _write(self, held: Held, data: Mapping[str, Any]) -> dict[str, Any]:
        key = data["key"]
        tensor = held.residuals[key] if key in held.residuals else held.tensors[key]
        write = partial(self._parts.write, data["file"], data["name"], tensor)
        return {"entry": await asyncio.get_running_loop().run_in_executor(self._disk, write)}


class Superseded(Exception):
    """The coordinator that asks is not the last one that was started."""


class Unready(Exception):
    """No coordinator has come yet."""


def epoch_of(start: str) -> int:
    """-1 of no start."""
    number = start.partition(" ")[0]
    return int(number) if number.isascii() and number.isdigit() and len(number) < 16 else -1


def peer_of(request: Request) -> str:
    return request.client.host if request.client else ""
