"""What events.jsonl and state.json must look like: every kind with its fields and their types, nothing else."""

import math
import re
from collections.abc import Callable, Iterable
from typing import Any

Check = Callable[[Any], bool]

WHOLE: Check = lambda v: isinstance(v, int) and not isinstance(v, bool) and v >= 0
POSITIVE: Check = lambda v: WHOLE(v) and v > 0
NUMBER: Check = lambda v: isinstance(v, int | float) and not isinstance(v, bool) and math.isfinite(v)
SECONDS: Check = lambda v: NUMBER(v) and v >= 0
TEXT: Check = lambda v: isinstance(v, str) and bool(v)
FLAG: Check = lambda v: isinstance(v, bool)
SHA256: Check = lambda v: isinstance(v, str) and re.fullmatch("[0-9a-f]{64}", v) is not None


def maybe(check: Check) -> Check:
    return lambda v: v is None or check(v)


def each(check: Check) -> Check:
    return lambda v: isinstance(v, list) and all(map(check, v))


COMMON = {"t": SECONDS, "event": TEXT, "island": WHOLE, "incarnation": TEXT, "step": WHOLE}
KINDS: dict[str, dict[str, Check]] = {
    "start": {},
    "join": {"slot": WHOLE},
    # -1: from the hub.
    "heal": {
        "source": lambda v: v == -1 or WHOLE(v),
        "bytes": POSITIVE,
        "seconds": SECONDS,
        "version": WHOLE,
    },
    "inner": {"loss": NUMBER, "tokens": POSITIVE, "seconds": SECONDS, "lr": SECONDS},
    "round": {
        "round": WHOLE,
        "fragment": WHOLE,
        "version": WHOLE,
        "method": TEXT,
        "participants": each(WHOLE),
        "weights": each(SECONDS),
        "tokens": WHOLE,
        "bytes_sent": WHOLE,
        "bytes_received": WHOLE,
        "exchange_s": SECONDS,
        "stall_s": SECONDS,
        "committed": FLAG,
        "digest": SHA256,
    },
    "consensus": {"round": WHOLE, "js": maybe(NUMBER), "l2": maybe(NUMBER), "cosine": maybe(NUMBER)},
    "checkpoint": {"path": TEXT, "seconds": SECONDS, "durable": FLAG},
    "waiting": {"for": lambda v: TEXT(v) or (bool(v) and each(WHOLE)(v)), "since": SECONDS, "why": TEXT},
    "drain": {"reason": TEXT, "phase": TEXT, "deadline": maybe(SECONDS)},
    "leave": {"reason": TEXT},
    "error": {"kind": TEXT, "message": TEXT},
    "end": {"tokens": POSITIVE},
}
STATE = {
    "state": lambda v: v in ("running", "done", "resume", "fatal"),
    "reason": lambda v: isinstance(v, str),
    "step": WHOLE,
    "island": WHOLE,
    "incarnation": TEXT,
    "pid": POSITIVE,
    "t": SECONDS,
}


def problems(events: Iterable[dict[str, Any]]) -> list[str]:
    """One line for everything that is not as in the contract."""
    found = []
    for event in events:
        kind = event.get("event")
        if kind not in KINDS:
            found.append(f"unknown kind {kind!r}")
        else:
            found += [f"{kind}: {problem}" for problem in _fields(event, COMMON | KINDS[kind])]
    return found


def state_problems(state: dict[str, Any]) -> list[str]:
    return _fields(state, STATE)


def _fields(value: dict[str, Any], schema: dict[str, Check]) -> list[str]:
    found = [f"{name} is missing" for name in schema.keys() - value.keys()]
    found += [f"{name} is not in the contract" for name in value.keys() - schema.keys()]
    found += [f"{n} = {value[n]!r}" for n, check in schema.items() if n in value and not check(value[n])]
    return found
