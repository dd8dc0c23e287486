"""``validate FILE... [--section.key value ...]``: check configurations and print them with the origin of each value."""

import sys
from collections.abc import Iterator
from typing import Any

from rich.console import Console
from rich.text import Text

from torchtitan_diloco.config.fields import items
from torchtitan_diloco.config.load import ConfigError, Resolved, load_config
from torchtitan_diloco.config.problems import DEFAULT
from torchtitan_diloco.errors import UserError

USAGE = """usage: torchtitan-diloco validate FILE... [--section.key value ...]

Checks each file with the given settings on top and prints its resolved configuration: every key, its value and where
the value comes from. All mistakes of all files are reported at once; exit code 2 if there is one."""


def main(argv: list[str]) -> int:
    """Returns 0; raises UserError with every problem of every file."""
    if argv and argv[0] in ("-h", "--help"):
        print(USAGE)
        return 0
    count = next((i for i, arg in enumerate(argv) if arg.startswith("--")), len(argv))
    files, overrides = argv[:count], argv[count:]
    if not files:
        raise UserError("validate: a configuration file is missing; " + USAGE.splitlines()[0])
    loaded, problems = [], []
    for file in files:
        try:
            loaded.append(load_config(file, overrides))
        except ConfigError as e:
            problems += e.problems
    if problems:
        raise ConfigError(list(dict.fromkeys(problems)))
    console = Console(file=sys.stdout, highlight=False, soft_wrap=True)
    for resolved in loaded:
        for line in render(resolved):
            console.print(line)
    return 0


def render(resolved: Resolved) -> Iterator[Text]:
    """The resolved configuration, one line per key: ``key = value   origin``; defaults are dimmed; then the notes."""
    yield Text(f"{resolved.path}: valid", style="bold")
    rows = [(key, _shown(value), resolved.origins[key]) for key, value in items(resolved.config)]
    name_width = max(len(key) for key, _, _ in rows)
    value_width = max(len(value) for _, value, _ in rows if len(value) <= 40)
    for key, value, origin in rows:
        style = "dim" if origin == DEFAULT else ""
        yield Text(f"  {key:<{name_width}} = {value:<{value_width}}  {origin}", style=style)
    for note in resolved.notes:
        yield Text(f"note: {note}", style="yellow")


def _shown(value: Any) -> str:
    """A value as TOML would write it; "(absent)" for what has no value."""
    if value is None:
        return "(absent)"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return f"[{', '.join(map(_shown, value))}]"
    return f'"{value}"' if isinstance(value, str) else str(value)
