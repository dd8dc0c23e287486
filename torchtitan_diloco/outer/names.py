"""The names that settings choose from, known without importing what they stand for, so that a look at them takes no torch.

A third party's name is known once its module has registered it in this process, or where its package declares the module
as an entry point: group ``torchtitan_diloco.`` + the setting, name = the registered one, for instance in its pyproject.toml

    [project.entry-points."torchtitan_diloco.semi_sync.method"]
    gossip = "my_package.gossip"     # holds @register_semi_sync("gossip")
"""

from importlib.metadata import entry_points

METHOD, TRANSPORT, WIRE = "semi_sync.method", "transport.kind", "semi_sync.codec.wire"
OUTER, MERGE = "semi_sync.outer.name", "semi_sync.merge.method"

SHIPPED: dict[str, tuple[str, ...]] = {
    METHOD: ("none", "sync", "local_sgd", "diloco"),
    TRANSPORT: ("gloo", "memory", "hub", "spool"),
    WIRE: ("fp32", "bf16", "int8", "int4", "fp4_e3m0", "topk"),
    OUTER: ("sgd",),
    MERGE: ("mean",),
}
"""Setting -> the names that it can have without third parties."""

WIRE_SETTINGS: dict[str, tuple[str, ...]] = {
    "fp32": (),
    "bf16": ("stochastic",),
    "int8": ("block", "stochastic"),
    "int4": ("block", "stochastic"),
    "fp4_e3m0": ("block", "stochastic"),
    "topk": ("density", "stochastic"),
}
"""Shipped codec -> which settings it takes."""

LARGEST_BLOCK = 65536
"""Values that share a scale, at most; with shipped codecs an even number of them."""

EXTENSIBLE = frozenset({METHOD, TRANSPORT, WIRE})
"""Settings whose names third parties can add to."""

_added: dict[str, set[str]] = {setting: set() for setting in EXTENSIBLE}


def add(setting: str, name: str) -> None:
    """What registries do with every name."""
    _added[setting].add(name)


def is_known(setting: str, name: str) -> bool:
    """Whether the setting can have this name, here and now."""
    if name in SHIPPED[setting]:
        return True
    # Installed packages are looked through, which takes longer than all the rest, only for a name that is not ours.
    return setting in EXTENSIBLE and (name in _added[setting] or name in _declared(setting))


def load_declared(setting: str, name: str) -> None:
    """Import the module that an installed package declares for the name, if one does; it registers it then."""
    for entry in entry_points(group=_group(setting), name=name):
        entry.load()


def _declared(setting: str) -> set[str]:
    return {entry.name for entry in entry_points(group=_group(setting))}


def _group(setting: str) -> str:
    return f"torchtitan_diloco.{setting}"
