"""A hub's workers as its coordinator sees them: the parts spread over them by bytes, and how each is spoken to.

The hub's state machine is the same with and without them. Its tensors are then names (``far``), its merges are requests, and
what the worker has made comes into force when the coordinator commits it, as everywhere; until then it is a tensor that
nobody knows of.
"""

import asyncio
import logging
import secrets
import ssl
import subprocess
import time
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from typing import Any
from weakref import WeakValueDictionary

import httpx
import torch

from torchtitan_diloco.errors import Resumable, UserError
from torchtitan_diloco.hub.dial import RUN
from torchtitan_diloco.hub.far import Far, FarUpload, Handle, far
from torchtitan_diloco.hub.parts import Parts, fragment_of
from torchtitan_diloco.hub.slot import Job
from torchtitan_diloco.hub.store import Fenced
from torchtitan_diloco.hub.terms import Terms
from torchtitan_diloco.hub.tls import distrust
from torchtitan_diloco.hub.upload import Upload
from torchtitan_diloco.hub.worker import FENCED, START
from torchtitan_diloco.hub.workshop import Workshop
from torchtitan_diloco.outer.merge import Contribution
from torchtitan_diloco.outer.merger import Merger
from torchtitan_diloco.outer.policy import Member
from torchtitan_diloco.outer.state import Advance, OuterState

logger = logging.getLogger(__name__)

LOST_S = 30.0  # silence after which a worker is lost; one whose process has ended is at once
REQUEST_S = 15.0  # longer than a worker lets work wait for its answer
RETRY_S = 0.2
PING_S = 2.0


class Lost(Resumable):
    """A worker has died, was started anew, or is not to be reached: what it held is gone, and the hub has to start again."""


class Worker:
    """How one of them is spoken to, in the event loop (``sync``) and from threads (``do``)."""

    def __init__(
        self, url: str, place: str, run_id: str, secret: str, trusted: ssl.SSLContext | bool = True, ca: str = "",
        process: subprocess.Popen[bytes] | None = None,
    ) -> None:  # fmt: skip
        """place: what islands put before a path; a port of the host by which they know the hub, or a whole address."""
        self.url, self._place, self._process, self._ca = url, place, process, ca
        self._headers = {RUN: run_id, "authorization": f"Bearer {secret}"}
        self._thread_client = httpx.Client(verify=trusted, trust_env=False, timeout=REQUEST_S)
        self._loop_client = httpx.AsyncClient(verify=trusted, trust_env=False, timeout=REQUEST_S)
        self._lock = asyncio.Lock()
        self._dropped: deque[str] = deque()  # by whichever thread lets go of something
        self._leaving: list[str] = []  # of those, what the worker may not have heard of yet
        self._handles: WeakValueDictionary[str, Handle] = WeakValueDictionary()
        self._uploads: WeakValueDictionary[str, FarUpload] = WeakValueDictionary()
        self._syncs = 0
        self._heard = 0.0
        self._fault: Lost | Fenced | None = None

    def handle(self, key: str = "") -> Handle:
        key = key or secrets.token_hex(16)
        handle = self._handles[key] = Handle(key, f"{self._place}/parts/{key}", self._dropped)
        return handle

    def upload(self, kind: str, nbytes: int, member: Member) -> FarUpload:
        handle = self.handle()
        upload = self._uploads[handle.key] = FarUpload(handle, nbytes, kind, member)
        return upload

    def begin(self, start: str) -> None:
        """Raises Lost, Fenced, or UserError where the settings are wrong."""
        self._headers[START] = start
        self._post("/worker/begin", {})

    def do(self, op: str, **what: Any) -> dict[str, Any]:
        """Blocks until it is done. Raises OSError and ValueError as the worker has seen them, Lost or Fenced."""
        body = {"op": op, "work": secrets.token_hex(8), **what}
        while (reply := self._post("/worker/do", body)).get("wait"):
            pass
        if "disk" in reply:
            raise OSError(f"{self.url}: {reply['disk']}")
        if "damaged" in reply:
            raise ValueError(f"{self.url}: {reply['damaged']}")
        if "broken" in reply:
            raise self._lost(f"it has failed: {reply['broken']}")
        return reply

    async def sync(self) -> bool:
        """Say what is needed and what is not; whether something has arrived. Raises Lost, Fenced."""
        async with self._lock:
            uploads = [upload for upload in list(self._uploads.values()) if not upload.complete]
            while self._dropped:
                self._leaving.append(self._dropped.popleft())
            if not uploads and not self._leaving and time.monotonic() - self._heard < PING_S:
                return False
            listed = [
                (u.handle.key, u.nbytes, u.kind, u.member.island, u.member.incarnation) for u in uploads
            ]
            self._syncs += 1
            body = {"serial": self._syncs, "uploads": listed, "drop": self._leaving}
            reply = await self._post_in_loop("/worker/sync", body)
            self._heard = time.monotonic()
            self._leaving = []
            for key in reply["read"]:
                if handle := self._handles.get(key):
                    handle.read = self._heard
            news = [upload.hear(reply["uploads"][upload.handle.key]) for upload in uploads]
            return any(news)

    def close(self) -> None:
        self._thread_client.close()
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            for pipe in (self._process.stdin, self._process.stdout):
                if pipe is not None:
                    with suppress(OSError):
                        pipe.close()

    # ---- requests --------------------------------------------------------------------------------------------------

    def _post(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        since = time.monotonic()
        while True:
            try:
                return self._checked(
                    self._thread_client.post(self.url + path, json=body, headers=self._headers)
                )
            except httpx.TransportError as error:
                self._require_hope(error, since)
            time.sleep(RETRY_S)

    async def _post_in_loop(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        since = time.monotonic()
        while True:
            try:
                response = await self._loop_client.post(self.url + path, json=body, headers=self._headers)
                return self._checked(response)
            except httpx.TransportError as error:
                self._require_hope(error, since)
            await asyncio.sleep(RETRY_S)

    def _checked(self, response: httpx.Response) -> dict[str, Any]:
        if response.is_success:
            return dict(response.json())
        try:
            answer = response.json()
            kind, reason = answer["kind"], str(answer["error"])
        except (ValueError, KeyError, TypeError):
            kind, reason = "", f"it answers {response.status_code}"
        if response.status_code == FENCED:
            self._fault = self._fault or Fenced(f"worker {self.url}: {reason}")
            raise self._fault
        if kind in ("forbidden", "refused"):
            raise UserError(
                f"syncer.worker_urls: the worker {self.url} refuses this hub ({reason}); give both the same job.name and "
                "syncer.worker_secret"
            )
        raise self._lost(reason)

    def _require_hope(self, error: httpx.TransportError, since: float) -> None:
        """Raises Lost where it makes no sense to try again."""
        if self._fault is not None:
            raise self._fault
        if mistake := distrust(error, self.url, self._ca):
            raise mistake
        if self._process is not None and self._process.poll() is not None:
            raise self._lost(f"its process has ended with code {self._process.returncode}")
        if time.monotonic() - since > LOST_S:
            raise self._lost(f"not reached for {LOST_S:g} s: {str(error) or type(error).__name__}")

    def _lost(self, why: str) -> "Lost | Fenced":
        self._fault = self._fault or Lost(
            f"worker {self.url} is lost ({why}); start the hub again, its state is kept"
        )
        return self._fault


class Crew(Workshop):
    """Whole fragments belong to workers, the largest first, each to the one that has least so far."""

    far = True

    def __init__(self, workers: Sequence[Worker]) -> None:
        self._workers = list(workers)
        self._terms: Terms | None = None
        self._owners: list[int] = []

    def begin(self, epoch: int) -> None:
        """Raises Lost, Fenced, or UserError where a worker does not know the secret or serves another run."""
        start = f"{epoch} {secrets.token_hex(8)}"
        for worker in self._workers:
            worker.begin(start)
            logger.info("a worker of this hub is at %s", worker.url)

    def of(self, fragment: int) -> Worker:
        return self._workers[self._owners[fragment]]

    def merger(self, terms: Terms) -> Merger:
        merger = terms.merger()
        self._terms, self._owners = terms, deal(terms.sizes, len(self._workers))
        return merger

    def upload(self, kind: str, fragment: int, nbytes: int, member: Member) -> Upload:
        return self.of(fragment).upload(kind, nbytes, member)

    def job(
        self, slot: int, fragment: int, contributions: list[Contribution], merger: Merger, state: OuterState
    ) -> Job:
        assert self._terms is not None
        step = state.outer_step(fragment, slot)  # the worker's own; this one is not called
        return FarJob(
            slot, fragment, contributions, merger, step, self.of(fragment), self._terms, state.copy()
        )

    async def sync(self) -> bool:
        return any(await asyncio.gather(*(worker.sync() for worker in self._workers)))

    def each(self, op: str, **what: Any) -> None:
        """Raises OSError, Lost or Fenced."""
        for worker in self._workers:
            worker.do(op, **what)

    def describe(self) -> list[dict[str, Any]]:
        sizes = self._terms.sizes if self._terms else ()
        shares = [
            [i for i, owner in enumerate(self._owners) if owner == k] for k in range(len(self._workers))
        ]
        return [
            {"url": worker.url, "fragments": share, "values": sum(sizes[i] for i in share)}
            for worker, share in zip(self._workers, shares, strict=True)
        ]

    def close(self) -> None:
        for worker in self._workers:
            worker.close()


class FarJob(Job):
    """As ``Job``, at the fragment's worker. Its ``run`` waits for the worker."""

    def __init__(
        self, slot: int, fragment: int, contributions: list[Contribution], merger: Merger, outer_step: Any,
        worker: Worker, terms: Terms, state: OuterState,
    ) -> None:  # fmt: skip
        super().__init__(slot, fragment, contributions, merger, outer_step)
        self.worker, self.terms, self.state = worker, terms, state

    def run(self) -> None:
        """Raises Lost or Fenced."""
        worker, fragment, slot, made = self.worker, self.fragment, self.slot, secrets.token_hex(16)
        held = self.state.states[fragment]
        reply = worker.do(
            "merge",
            slot=slot,
            fragment=fragment,
            terms=self.terms.to_json(),
            made=made,
            anchor=key_of(held.anchor),
            momentum="" if held.momentum is None else key_of(held.momentum),
            residuals={name: key_of(kept) for name, kept in self.merger.kept(fragment).items()},
            contributions=[(c.island, c.steps, c.tokens, key_of(c.payload)) for c in self.contributions],
        )
        self.contributions = []

        def result(name: str, numel: int, dtype: torch.dtype = torch.float32, digest: str = "") -> Far:
            return far(worker.handle(f"{made}.{name}"), numel, dtype, digest)

        numel, digest = self.terms.sizes[fragment], str(reply["digest"])
        self.payload = result("payload", int(reply["nbytes"]), torch.uint8)
        anchor = result("anchor", numel, digest=digest)
        momentum = result("momentum", numel) if reply["momentum"] else None
        self.advance = Advance(anchor, momentum, digest, str(reply["merged"]), bool(reply["finite"]))
        self.weights = tuple(float(weight) for weight in reply["weights"])
        self.merger.propose(
            fragment, slot, {name: result(name, int(size)) for name, size in reply["residuals"].items()}
        )


class FarParts(Parts):
    """Each worker writes and reads those of its fragments in its own folder."""

    def __init__(self, crew: Crew) -> None:
        self._crew = crew

    def of(self, terms: Terms) -> None:
        self._crew.merger(terms)

    def read(self, name: str, entry: Mapping[str, Any]) -> torch.Tensor:
        worker = self._crew.of(fragment_of(name))
        handle = worker.handle()
        reply = worker.do("load", name=name, entry=dict(entry), key=handle.key)
        return far(handle, int(reply["numel"]), torch.float32, str(reply["digest"]))

    def write(self, file: str, name: str, tensor: torch.Tensor) -> dict[str, Any]:
        reply = self._crew.of(fragment_of(name)).do("write", file=file, name=name, key=key_of(tensor))
        return dict(reply["entry"])

    def remove(self, files: Collection[str]) -> None:
        for file in files:
            # One that cannot be removed stays until the hub is started again.
            with suppress(OSError):
                self._crew.of(fragment_of(file)).do("remove", files=[file])

    def keep(self, files: Collection[str]) -> None:
        self._crew.each("keep", files=sorted(files))


def key_of(tensor: torch.Tensor) -> str:
    assert isinstance(tensor, Far)
    return tensor.handle.key


def deal(sizes: Sequence[int], count: int) -> list[int]:
    """Whose each part is: the largest first, each to who has least so far."""
    owners, weight = [0] * len(sizes), [0] * count
    for i in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        owners[i] = min(range(count), key=lambda k: (weight[k], k))
        weight[owners[i]] += sizes[i]
    return owners
