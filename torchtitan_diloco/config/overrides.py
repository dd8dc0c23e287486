"""Command-line settings: ``--section.key value``, ``--section.key=value``, ``--flag``, ``--no-section.flag``."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torchtitan_diloco.config.fields import keys, sections
from torchtitan_diloco.config.names import unknown_key
from torchtitan_diloco.config.retired import FAULT_TOLERANCE_MOVED, FAULT_TOLERANCE_RETIRED, MOVED, RETIRED
from torchtitan_diloco.errors import UserError


@dataclass(frozen=True, slots=True)
class Override:
    """One setting from the command line: a key with its text, or a mistake to report."""

    key: str
    text: str = ""
    mistake: str = ""


def take_config_file(argv: Sequence[str]) -> tuple[str, list[str]]:
    """Split a trainer's arguments into the file of ``--job.config_file`` and the rest, which are overrides.

    Raises:
        UserError: no file, or more than one.
    """
    files: list[str] = []
    rest: list[str] = []
    tokens = iter(argv)
    for token in tokens:
        name, equals, value = token.partition("=")
        if name.replace("-", "_") != "__job.config_file":
            rest.append(token)
        elif equals:
            files.append(value)
        else:
            files.append(next(tokens, ""))
    if not files or not files[0]:
        raise UserError("command line: --job.config_file FILE.toml is missing")
    if len(files) > 1:
        raise UserError(f"command line: --job.config_file is given {len(files)} times; give it once")
    return files[0], rest


def parse_overrides(argv: Sequence[str]) -> Iterator[Override]:
    """The settings of a command line in order; a later one for the same key wins."""
    index = 0
    while index < len(argv):
        token = argv[index]
        index += 1
        if not token.startswith("--") or token == "--":
            yield Override(token, mistake="unexpected argument; settings are written --section.key value")
            continue
        name, equals, value = token[2:].partition("=")
        key, negated = _resolve(name)
        following = argv[index] if index < len(argv) else None
        has_value = following is not None and not following.startswith("--")
        mistake = _mistake(key)
        if mistake:
            # Its value, if it has one, belongs to it and is no second mistake.
            index += bool(not equals and has_value)
            yield Override(key, mistake=mistake)
        elif negated:
            wrong = f"takes no value; write --{key} true or --{key} false" if equals else ""
            yield Override(key, "false", mistake=wrong)
        elif equals:
            yield Override(key, value)
        elif keys()[key].base == "bool" and not (has_value and str(following).lower() in ("true", "false")):
            yield Override(key, "true")
        elif has_value:
            index += 1
            yield Override(key, str(following))
        else:
            yield Override(key, mistake="a value is missing")


def _resolve(name: str) -> tuple[str, bool]:
    """Dotted key meant by an option, and whether it is the negated form of a boolean."""
    key = name.replace("-", "_")
    if key in keys():
        return key, False
    section, _, leaf = key.rpartition(".")
    for candidate in (key.removeprefix("no_"), f"{section}.{leaf.removeprefix('no_')}"):
        if candidate != key and candidate in keys() and keys()[candidate].base == "bool":
            return candidate, True
    return key, False


def _mistake(key: str) -> str:
    if key in keys():
        return ""
    if key == "job.config_file":
        return "the file is given already; remove this"
    moved = (MOVED | FAULT_TOLERANCE_MOVED).get(key)
    if moved:
        return f"is {moved.new} now; write --{moved.new}"
    if key in FAULT_TOLERANCE_RETIRED:
        return f"cannot be honoured: {FAULT_TOLERANCE_RETIRED[key][1]}"
    if key == "fault_tolerance.enable":
        return "choose the method instead: --semi_sync.method"
    for retired in (key, key.split(".")[0]):
        if retired in RETIRED:
            return f"gone in TorchTitan 0.3: {RETIRED[retired]}"
    if key in sections():
        return f"is a section; settings are written --{key}.KEY value"
    return unknown_key(key)
