"""Writes the reference page of the configuration, docs/config.md, from the schema.

``python -m torchtitan_diloco.config.reference > docs/config.md``; a test checks that the committed page is up to date.
"""

import ast
import inspect
import json
import sys
import textwrap
from collections.abc import Iterator
from functools import cache
from typing import Any

from torchtitan_diloco.config import retired
from torchtitan_diloco.config.fields import Kind, get, is_array_of_tables, keys, kinds, required, sections
from torchtitan_diloco.config.ranges import RANGES, TABLE_RANGES, Range
from torchtitan_diloco.config.schema import IslandTable, RunConfig
from torchtitan_diloco.config.shared import AGREED, LOCKSTEP, why_shared
from torchtitan_diloco.config.upstream import bases

_INTRODUCTION = """\
# Configuration

<!-- Generated: python -m torchtitan_diloco.config.reference > docs/config.md -->

One TOML file describes a run. Its sections and keys are those of TorchTitan v0.2.2, the last release that reads TOML,
and ours: `data`, `island`, `islands`, `lighthouse`, `transport`, `semi_sync`. `torchtitan-diloco validate FILE` checks a
file and shows every value with its origin. A value comes from the first of these places that says it:

1. the command line, `--section.key value`
2. the `[[islands]]` table of the island that `--island.id N` names
3. the rest of the file
4. the TorchTitan config function that `job.base` names
5. the default

TOML has no null: write `"none"` for an optional key that something above its default would otherwise fill.
"""

_ISLANDS = """\
## `[[islands]]`

One table per island; `semi_sync.num_islands` is their number. Below a table stand the settings that the island has for
itself, as sub-tables:

```toml
[[islands]]
id = 0
name = "leonardo"
nodes = 2
ranks = 4

[islands.training]
local_batch_size = 2

[[islands]]
id = 1
parallelism.tensor_parallel_degree = 4
```

`semi_sync.sync_every` in a table is the number of inner steps that this island makes in the time of the run's
`sync_every`: a faster island gets a larger one. All islands send the same slots and end with the same last one.
`training.steps` and the `lr_scheduler` section count the run's progress, in which a window has the run's `sync_every` steps;
`checkpoint.interval`, `metrics.log_freq`, `semi_sync.overlap` and the step numbers in logs and events count the island's own.

`torchtitan-diloco run` starts `nodes` x `ranks` processes for each (1 where `ranks` is absent). A trainer that is started
by hand needs `--island.id N`.
"""

_SECTIONS = """\
## Sections of v0.2 that TorchTitan 0.3 does not have

| Section | What becomes of it |
| --- | --- |
| `[quantize]` | honoured by the converters that `model.converters` names; gone options are listed below |
| `[fault_tolerance]` | taken over as `[semi_sync]`, `[transport]` and `[island]`, see below |
| `[memory_estimation]` | refused where it is switched on: TorchTitan 0.3 has none |
| `[experimental]` | refused where it names something: packages register methods and transports with decorators |
"""

_FAULT_TOLERANCE = """\
## `[fault_tolerance]`

With `enable = true` the table is taken over, with notes; with `enable = false` it has no effect and
`semi_sync.method` is "none" unless it is written. An absent `sync_steps` is 5, as it was; without `semi_sync_method` the
method is "sync", as it was too.
"""


def page() -> str:
    """The whole page, in Markdown."""
    parts = [_INTRODUCTION]
    for section, table in sections().items():
        rows = list(_rows(section, table))
        if rows:
            parts.append(_section(f"[{section}]", table, rows))
    for key in filter(is_array_of_tables, keys()):
        table = getattr(keys()[key].item, "table", object)
        if table is not IslandTable:
            parts.append(_section(f"[[{key}]]", table, list(_entry_rows(table))))
    parts += [
        _ISLANDS,
        _table("Key", "Type", "Default", "Meaning", rows=_entry_rows(IslandTable)),
        _agreement(),
    ]
    parts += [_bases(), _SECTIONS, _moved(), _fault_tolerance(), _retired()]
    return "\n".join(part.rstrip() + "\n" for part in parts)


def _section(title: str, table: type, rows: list[tuple[str, ...]]) -> str:
    said = " ".join((inspect.getdoc(table) or "").split()).partition(": ")[2].rstrip(".")
    head = f"## `{title}`\n\n" + (f"{said[:1].upper()}{said[1:]}.\n\n" if said else "")
    return head + _table("Key", "Type", "Default", "Meaning", rows=iter(rows))


def _rows(section: str, table: type) -> Iterator[tuple[str, ...]]:
    for name, kind in kinds(table).items():
        key = f"{section}.{name}"
        if kind.base != "table" and not is_array_of_tables(key):
            default = _shown(get(RunConfig(), key))
            yield f"`{name}`", _type(kind, RANGES.get(key)), default, field_docs(table)[name]


def _entry_rows(table: type) -> Iterator[tuple[str, ...]]:
    ranges = TABLE_RANGES[table]
    example: Any = table(**dict.fromkeys(required(table), ""))
    for name, kind in kinds(table).items():
        default = "required" if name in required(table) else _shown(getattr(example, name))
        yield f"`{name}`", _type(kind, ranges.get(name)), default, field_docs(table)[name]


def _type(kind: Kind, allowed: Range | None) -> str:
    if kind.base == "choice":
        text = ", ".join(f"`{json.dumps(choice)}`" for choice in kind.choices)
    elif kind.item is not None:
        text = f"array of {_type(kind.item, None)}"
    else:
        text = {"bool": "boolean", "int": "integer", "float": "number", "str": "string"}[kind.base]
    if allowed:
        text = f"{text}, {allowed.wording.removeprefix('a ').removesuffix(' string')}"
    return text + (" (optional)" if kind.optional else "")


def _shown(value: Any) -> str:
    return "absent" if value is None else f"`{json.dumps(value)}`"


@cache
def field_docs(table: type) -> dict[str, str]:
    """Field -> the docstring under it, on one line."""
    (body,) = ast.parse(textwrap.dedent(inspect.getsource(table))).body
    assert isinstance(body, ast.ClassDef)
    docs: dict[str, str] = {}
    for field, after in zip(body.body, body.body[1:], strict=False):
        if (
            isinstance(field, ast.AnnAssign)
            and isinstance(field.target, ast.Name)
            and isinstance(after, ast.Expr)
        ):
            docs[field.target.id] = " ".join(str(ast.literal_eval(after.value)).split())
    return docs


def _table(*titles: str, rows: Iterator[tuple[str, ...]]) -> str:
    lines = [titles, tuple("---" for _ in titles), *rows]
    return "".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |\n" for line in lines)


def _agreement() -> str:
    own = [key for key in keys() if not why_shared(key)]
    whole = [s for s in sections() if "." not in s and all(k in own for k in keys() if k.startswith(f"{s}."))]
    single = [key for key in own if key.partition(".")[0] not in whole]
    reasons = ((f"`{key}`", reason) for key, reason in AGREED.items())
    return (
        "### What may differ between islands\n\n"
        f"- every key of {', '.join(f'`[{s}]`' for s in whole)}\n- {', '.join(f'`{k}`' for k in single)}\n\n"
        "These must agree; islands compare them, and the content of their tokenizers, when they join:\n\n"
        + _table("Key or section", "Why", rows=reasons)
        + '\nWith `semi_sync.method = "sync"`, and beside them the number of processes, these as well:\n\n'
        + _table("Key or section", "Why", rows=((f"`{key}`", reason) for key, reason in LOCKSTEP.items()))
    )


def _bases() -> str:
    return (
        "## `job.base`\n\nThe functions of TorchTitan's `torchtitan.models.MODEL.config_registry`. Loader (where "
        "`[[data.sources]]` is given), checkpointer, metrics and dump folder are ours, everything else is the function's. "
        "`validate` answers from a table of the TorchTitan release it ships for, without importing TorchTitan.\n\n"
        + "".join(f"- `{name}`\n" for name in bases())
    )


def _moved() -> str:
    rows = [(f"`{old}`", f"`{moved.new}`") for old, moved in retired.MOVED.items()]
    where = " and ".join(f"`{key}`" for key in retired.NAME_MODULES)
    rows += [(f"module `{old}` in {where}", f"`{new}`") for old, new in retired.RENAMED_MODULES.items()]
    return "## Names that have changed\n\nTaken over, with a note.\n\n" + _table(
        "Old", "Now", rows=iter(rows)
    )


def _fault_tolerance() -> str:
    def rows() -> Iterator[tuple[str, ...]]:
        for old, moved in retired.FAULT_TOLERANCE_MOVED.items():
            only = f" ({' or '.join(map(json.dumps, moved.only))})" if moved.only else ""
            unit = f", divided by {moved.divisor}" if moved.divisor != 1 else ""
            yield f"`{old}`", f"`{moved.new}`{only}{unit}"
        for old, (value, remedy) in retired.FAULT_TOLERANCE_RETIRED.items():
            yield f"`{old}`", f"accepted as `{json.dumps(value)}`; otherwise refused: {remedy}"

    return _FAULT_TOLERANCE + "\n" + _table("Key", "Becomes", rows=rows())


def _retired() -> str:
    def rows() -> Iterator[tuple[str, ...]]:
        for key, remedy in retired.RETIRED.items():
            accepted = ", ".join(f"`{json.dumps(v)}`" for v in retired.HARMLESS.get(key, ()))
            if key in retired.SAME_AS:
                accepted = f"the value of `{retired.SAME_AS[key]}`"
            yield f"`{key}`", accepted, remedy

    return (
        "## Keys that TorchTitan 0.3 cannot honour\n\nAn error with the remedy, unless the value says what happens "
        "anyway or nothing uses it: a `[quantize]` table whose name is not in `model.converters`, the overlap of a pipeline "
        "that is not there.\n\n" + _table("Key", "Accepted", "Otherwise", rows=rows())
    )


if __name__ == "__main__":
    sys.stdout.write(page())
