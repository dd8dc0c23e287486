"""Checks one value against the kind of its key: from TOML (typed) or from the command line (text)."""

import json
import math
import re
from typing import Any

from torchtitan_diloco.config.fields import Kind
from torchtitan_diloco.config.names import nearest_choice
from torchtitan_diloco.config.problems import without_secrets

_INTEGER = re.compile(r"[+-]?[0-9][0-9_]*")
_MUST_BE = {
    "bool": "true or false",
    "int": "an integer",
    "float": "a number",
    "str": "a string",
    "choice": "a string",
    "list": "an array",
    "table": "a table",
}


class WrongValue(Exception):
    """The value does not fit; the message completes "<key>: ..."."""


def describe(value: Any) -> str:
    """A TOML value in words."""
    if isinstance(value, bool):
        return f"a boolean ({str(value).lower()})"
    if isinstance(value, int):
        return f"an integer ({value})" if abs(value) < 1 << 64 else "an integer of more than 64 bits"
    if isinstance(value, float):
        return f"a float ({value})"
    if isinstance(value, str):
        return f"a string ({_quoted(value)})"
    if isinstance(value, list):
        return "an array"
    if isinstance(value, dict):
        return "a table"
    return "a date or time"


def _quoted(text: str) -> str:
    text = without_secrets(text)  # before it is cut
    return json.dumps(text if len(text) <= 40 else text[:37] + "...", ensure_ascii=False)


def check_value(kind: Kind, value: Any) -> Any:
    """The value as the schema stores it; "none" is an absent optional one. Lists of tables are not for this function.

    Raises:
        WrongValue: wrong type, wrong choice, or a number that cannot be stored.
    """
    if kind.optional and value == "none":
        return None
    if kind.base == "float":
        if isinstance(value, int) and not isinstance(value, bool):
            value = _to_float(value)
        if isinstance(value, float):
            if not math.isfinite(value):
                raise WrongValue(f"must be a finite number, got {value}")
            return value
    elif kind.base == "int":
        if isinstance(value, int) and not isinstance(value, bool):
            if not -(1 << 63) <= value < 1 << 63:
                raise WrongValue("must fit in 64 bits")
            return value
    elif kind.base == "bool":
        if isinstance(value, bool):
            return value
    elif kind.base == "list":
        if isinstance(value, list):
            return _check_items(kind, value)
    elif isinstance(value, str):
        if kind.base == "choice" and value not in kind.choices:
            near = nearest_choice(value, kind.choices)
            hint = f"; did you mean {json.dumps(near)}?" if near else ""
            raise WrongValue(f"must be {_one_of(kind.choices)}, got {_quoted(value)}{hint}")
        return value
    raise WrongValue(f"must be {_MUST_BE[kind.base]}, got {describe(value)}{_without_quotes(kind, value)}")


def _check_items(kind: Kind, value: list[Any]) -> list[Any]:
    assert kind.item is not None
    checked = []
    for i, item in enumerate(value):
        try:
            checked.append(check_value(kind.item, item))
        except WrongValue as e:
            raise WrongValue(f"item {i + 1} {e}") from None
    return checked


def _to_float(value: int) -> float:
    try:
        return float(value)
    except OverflowError:
        raise WrongValue("must be a finite number, got an integer too large for one") from None


def _one_of(choices: tuple[str, ...]) -> str:
    quoted = [json.dumps(c) for c in choices]
    return quoted[0] if len(quoted) == 1 else f"{', '.join(quoted[:-1])} or {quoted[-1]}"


def _without_quotes(kind: Kind, value: Any) -> str:
    """The remedy for ``steps = "64"``."""
    if not isinstance(value, str):
        return ""
    try:
        parse_text(kind, value)
    except WrongValue:
        return ""
    return f"; write {value} without quotes" if kind.base in ("bool", "int", "float") else ""


def parse_text(kind: Kind, text: str) -> Any:
    """Value of a command-line argument; lists as JSON or comma-separated, "None" for an absent optional value.

    Returns:
        For a list of tables the bare list of dicts, still to be checked.

    Raises:
        WrongValue: as `check_value`.
    """
    if kind.optional and text in ("None", "none"):
        return None
    if kind.base == "bool":
        if text.lower() not in ("true", "false"):
            raise WrongValue(f"must be true or false, got {_quoted(text)}")
        return text.lower() == "true"
    if kind.base == "int":
        if not _INTEGER.fullmatch(text) or len(text) > 40:
            raise WrongValue(f"must be an integer, got {_quoted(text)}")
        return check_value(kind, int(text.replace("_", "")))
    if kind.base == "float":
        try:
            number = float(text)
        except ValueError:
            raise WrongValue(f"must be a number, got {_quoted(text)}") from None
        return check_value(kind, number)
    if kind.base == "list":
        return _parse_list(kind, text)
    return check_value(kind, text)


def _parse_list(kind: Kind, text: str) -> Any:
    assert kind.item is not None
    if text.lstrip().startswith("["):
        try:
            value = json.loads(text)
        except (ValueError, RecursionError) as e:
            raise WrongValue(f"is not valid JSON ({e})") from None
    elif kind.item.base in ("str", "choice"):
        value = [part.strip() for part in text.split(",")] if text.strip() else []
    else:
        raise WrongValue(f"must be a JSON array, got {_quoted(text)}")
    return value if kind.item.base == "table" else check_value(kind, value)
