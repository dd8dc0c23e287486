"""``validate FILE... [--section.key value ...]``: check configurations and print them with the origin of each value."""

import sys
from collections.abc import Iterator
from typing import Any

from rich.console import Console
from rich.text import Text

from torchtitan_diloco.config.fields import items, leaves
from torchtitan_diloco.config.islands import for_island
from torchtitan_diloco.config.load import ConfigError, Resolved, load_config
from torchtitan_diloco.config.paths import absent_paths
from torchtitan_diloco.config.problems import COMMAND_LINE, DEFAULT
from torchtitan_diloco.config.reach import NO_SPOOL_FOLDER, no_spool_folder
from torchtitan_diloco.errors import UserError

USAGE = """usage: torchtitan-diloco validate FILE... [--section.key value ...]

Checks each file with the given settings on top and prints its resolved configuration: every key, its value and where
the value comes from; then what the [[islands]] have different. All mistakes of all files are reported at once; exit
code 2 if there is one. Paths that do not exist here are warnings: the run may start elsewhere."""


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
            loaded.append(load_config(file, overrides).with_model())
            if no_spool_folder(loaded[-1].config):  # the hub reads the same file, and needs none
                problems.append(f"{file}: {NO_SPOOL_FOLDER}; set it, here or with --transport.dir")
        except ConfigError as e:
            problems += e.problems
    if problems:
        raise ConfigError(list(dict.fromkeys(problems)))
    console = Console(file=sys.stdout, highlight=False, soft_wrap=True)
    for resolved in loaded:
        for line in (*render(resolved), *render_islands(resolved), *remarks(resolved)):
            console.print(line)
    return 0


def render(resolved: Resolved) -> Iterator[Text]:
    """The resolved configuration, one line per key: ``key = value   origin``; defaults are dimmed."""
    yield Text(f"{resolved.path}: valid", style="bold")
    rows = [(key, _shown(value), resolved.origins[key]) for key, value in items(resolved.config)]
    name_width = max(len(key) for key, _, _ in rows)
    value_width = max(len(value) for _, value, _ in rows if len(value) <= 40)
    for key, value, origin in rows:
        style = "dim" if origin == DEFAULT else ""
        yield Text(f"  {key:<{name_width}} = {value:<{value_width}}  {origin}", style=style)


def render_islands(resolved: Resolved) -> Iterator[Text]:
    """One line for each setting that an island has for itself, beside the run's."""
    shared = dict(items(resolved.config))
    for i, table in enumerate(resolved.config.islands):
        who = f"island {table.id}" + (f" ({table.name})" if table.name else "")
        if not table.settings:
            yield Text(f"  {who}: as the run")
        for leaf, value in (pair for key, own in table.settings.items() for pair in leaves(key, own)):
            instead = f" instead of {_shown(shared[leaf])}" if leaf in shared else ""
            yield Text(
                f"  {who}: {leaf} = {_shown(value)}{instead}  {resolved.origins[f'islands[{i}].{leaf}']}"
            )


def remarks(resolved: Resolved) -> Iterator[Text]:
    """Warnings about paths, each once for all islands, then the notes."""
    config, views = resolved.config, [resolved.config]
    if config.islands and resolved.origins["island.id"] != COMMAND_LINE:
        views = [for_island(config, table.id) for table in config.islands]
    for warning in dict.fromkeys(sentence for view in views for sentence in absent_paths(view)):
        yield Text(f"warning: {warning}", style="bold yellow")
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
