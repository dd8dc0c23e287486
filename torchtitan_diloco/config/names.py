"""The nearest valid name for a key or section that does not exist."""

from collections.abc import Iterable
from difflib import SequenceMatcher

from torchtitan_diloco.config.fields import is_array_of_tables, keys, kinds, sections
from torchtitan_diloco.config.retired import ALIASES, FAULT_TOLERANCE_MOVED, MOVED

_CLOSE_ENOUGH = 0.7
_SAME_SECTION = 0.15
"""Bonus of a near miss in the section it was written in over the same name elsewhere."""


def _likeness(a: str, b: str) -> float:
    return SequenceMatcher(None, _plain(a), _plain(b)).ratio()


def _plain(name: str) -> str:
    return name.lower().replace("-", "_")


def _best(scored: Iterable[tuple[float, str]], limit: int = 3) -> list[str]:
    ranked = sorted(scored, key=lambda s: -s[0])
    if not ranked or ranked[0][0] < _CLOSE_ENOUGH:
        return []
    return [name for score, name in ranked if score > ranked[0][0] - 1e-9][:limit]


def unknown_key(path: str) -> str:
    """What to say about a dotted key that does not exist ("unknown key; did you mean ...")."""
    section, _, leaf = path.rpartition(".")
    scored = []
    for old, moved in (FAULT_TOLERANCE_MOVED | MOVED).items():
        scored.append((_likeness(leaf, old.rpartition(".")[2]), moved.new))
    for name in keys():
        its_section, _, its_leaf = name.rpartition(".")
        if its_section == section:
            bonus = _SAME_SECTION
        elif section and its_section.startswith(section + "."):
            bonus = _SAME_SECTION / 2
        else:
            bonus = 0.0
        scored.append((_likeness(leaf, its_leaf) + bonus, name))
    best = list(dict.fromkeys(_best(scored)))
    if best:
        return f"unknown key; did you mean {' or '.join(best)}?"
    if section in sections():
        return f"unknown key; [{section}] has: {', '.join(kinds(sections()[section]))}"
    return f"unknown key; sections: {', '.join(s for s in sections() if '.' not in s)}"


def unknown_item_key(leaf: str, prefix: str, table: type) -> str:
    """The same for a key inside an array of tables, for instance ``data.sources[0]``."""
    best = _best((_likeness(leaf, name), f"{prefix}.{name}") for name in kinds(table))
    if best:
        return f"unknown key; did you mean {' or '.join(best)}?"
    return f"unknown key; it has: {', '.join(kinds(table))}"


def unknown_section(path: str) -> tuple[str, str]:
    """The same for a table, and the dotted name of the section that was probably meant ("" where none is near)."""
    leaf = path.rpartition(".")[2]
    headers = {s: f"[{s}]" for s in sections()}
    headers |= {key: f"[[{key}]]" for key in keys() if is_array_of_tables(key)}
    scored = [(max(_likeness(path, s), _likeness(leaf, s.rpartition(".")[2])), h) for s, h in headers.items()]
    best = [ALIASES[path]] if path in ALIASES else _best(scored)
    if best:
        return f"unknown section; did you mean {' or '.join(best)}?", best[0].strip("[]")
    return f"unknown section; there are: {', '.join(s for s in sections() if '.' not in s)}", ""


def nearest_choice(value: str, choices: Iterable[str]) -> str | None:
    """The choice that was probably meant."""
    best = _best(((_likeness(value, c), c) for c in choices), limit=1)
    return best[0] if best else None
