"""Whether a line of a ledger holds what its kind must hold: a file that was edited by hand is read too."""

from collections.abc import Callable
from typing import Any

from torchtitan_diloco.outer.shares import expand, split

Test = Callable[[Any], bool]


def _is(*kinds: type) -> Test:
    return lambda value: isinstance(value, kinds) and not isinstance(value, bool)


def _count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _dict(key: Test, value: Test) -> Test:
    return lambda mapping: isinstance(mapping, dict) and all(key(k) and value(v) for k, v in mapping.items())


def _parsed(parse: Callable[[str], object]) -> Test:
    def test(value: Any) -> bool:
        try:
            return isinstance(value, str) and parse(value) is not None
        except ValueError:
            return False

    return test


def _range(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(map(_count, value)) and value[0] <= value[1]


def _source(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and isinstance(value.get("path"), str)
        and _count(value.get("samples"))
        and _count(value.get("shards"))
        and value["shards"] > 0
    )


_text, _number, _island, _stream = _is(str), _is(int, float), _parsed(int), _parsed(split)
_streams = _dict(_stream, _range)
_holds = _dict(_text, _parsed(expand))
_place: dict[str, Test] = {
    "t": _number,
    "island": _is(int),
    "lineage": _text,
    "slot": _is(int),
    "tokens_total": _number,
}
_KINDS: dict[str, dict[str, Test]] = {
    "start": {"sources": _dict(_text, _source), "holds": _holds},
    "head": _place | {"positions": _dict(_stream, _count)},
    "commit": _place
    | {
        "parent": _text,
        "consumed": _dict(_island, _streams),
        "skipped": _dict(_island, _streams),
        "members": _dict(_island, _holds),
    },
    "dropped": {"lineage": _text, "streams": _streams, "cause": _text},
    "reading": {"lineage": _text, "streams": _streams},
}  # fmt: skip


def is_entry(kind: str, entry: dict[str, Any]) -> bool:
    """Whether all that ``kind`` must hold is there, of the right type. Kinds that are not known hold what they like."""
    return all(key in entry and test(entry[key]) for key, test in _KINDS.get(kind, {}).items())
