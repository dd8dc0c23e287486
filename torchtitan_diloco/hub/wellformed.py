"""What has the form of a message; everything else is refused before the hub sees it."""

import json
from collections.abc import Mapping
from typing import Any

from torchtitan_diloco.hub.refusal import Refusal
from torchtitan_diloco.outer.state import FORMAT

DEEPEST = 16  # levels of a message
LARGEST = 1 << 53  # of a number; all programs agree on those below


def message(body: bytes) -> dict[str, Any]:
    """A JSON object of values that can be said again. Raises Refusal."""

    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is no JSON")

    try:
        data = json.loads(body.decode(), parse_constant=refuse)
        if b"\\u" in body:
            json.dumps(data, ensure_ascii=False).encode()  # half a character is none
    except (ValueError, RecursionError) as error:
        raise Refusal("malformed", f"the body is no JSON: {error}") from None
    if not isinstance(data, dict):
        raise Refusal("malformed", "the body is no JSON object")
    level: list[Any] = [data]
    for _ in range(DEEPEST):
        level = [child for value in level for child in children(value)]
    if level:
        raise Refusal("malformed", f"the body has more than {DEEPEST} levels")
    return data


def children(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return list(value.values())
    return value if isinstance(value, list) else []


def natural(data: Mapping[str, Any], name: str) -> int:
    """Raises Refusal unless it is a natural number."""
    value = data.get(name)
    if type(value) is not int or not 0 <= value < LARGEST:
        raise Refusal("malformed", f"{name} is {value!r}")
    return value


def whole(text: str, name: str) -> int:
    """A natural number in digits. Raises Refusal."""
    if not text.isascii() or not text.isdigit() or len(text) > 15:
        raise Refusal("malformed", f"{name} is {text!r}, not a number")
    return int(text)


def described(state: Any, fragments: int) -> dict[str, Any]:
    """A description as ``OuterState.describe`` gives it. Raises Refusal, ValueError, TypeError or KeyError."""
    if state["format"] != FORMAT:
        raise ValueError(f"the state has format {state['format']!r}, the hub reads {FORMAT}")
    entries = state["fragments"]
    if len(entries) != fragments:
        raise ValueError(f"a state of {len(entries)} fragments, where the run has {fragments}")
    natural(state, "slot")
    for entry in entries:
        natural(entry, "version")
        natural(entry, "tokens")
        if not (isinstance(entry["lineage"], str) and isinstance(entry["digest"], str)):
            raise ValueError("lineage or digest of the state is no text")
        if not isinstance(entry.get("trail", ""), str):
            raise ValueError("the trail of the state is no text")
    for name in state["positions"]:
        natural(state["positions"], name)
    for island, holds in state["members"].items():
        whole(island, "a member of the state")
        if holds is not None and not all(isinstance(ranges, str) for ranges in holds.values()):
            raise ValueError(f"island {island} of the state holds {holds!r}")
    names = ("format", "slot", "positions", "members", "fragments")
    return {name: state[name] for name in names}
