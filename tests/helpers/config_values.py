"""Values for every key of the schema: one other than the default, and Hypothesis strategies for any."""

from typing import Any

from hypothesis import strategies as st

from torchtitan_diloco.config.fields import Kind, get, keys, kinds, put
from torchtitan_diloco.config.schema import DataSource, IslandTable, RunConfig
from torchtitan_diloco.outer.names import SHIPPED

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)


def values(kind: Kind) -> st.SearchStrategy[Any]:
    """Any value the kind of a key allows, None included where it may be absent."""
    simple: dict[str, st.SearchStrategy[Any]] = {
        "bool": st.booleans(),
        "int": st.integers(1, 9) | st.integers(-(1 << 63), (1 << 63) - 1),
        "float": st.floats(0, 0.9) | st.floats(allow_nan=False, allow_infinity=False),
        "str": TEXT,
    }
    if kind.base == "choice":
        found: st.SearchStrategy[Any] = st.sampled_from(kind.choices)
    elif kind.base == "list":
        assert kind.item is not None
        # An empty list that may be absent is absent.
        found = st.lists(values(kind.item), min_size=int(kind.optional), max_size=3)
    elif kind.base == "table":
        assert kind.table is not None
        found = st.builds(kind.table, **{name: values(k) for name, k in kinds(kind.table).items()})
    else:
        found = simple[kind.base]
    return st.none() | found if kind.optional else found


NAMES = {"job.base", "model.name", "model.flavor", *SHIPPED}
"""Keys whose value must be something that TorchTitan or a registry has."""


@st.composite
def configs(draw: st.DrawFn) -> RunConfig:
    """A configuration with any number of keys set to anything their type allows."""
    config = RunConfig()
    for key in draw(
        st.lists(st.sampled_from(sorted(set(keys()) - NAMES - {"islands"})), unique=True, max_size=12)
    ):
        put(config, key, draw(values(keys()[key])))
    return config


toml_values = st.recursive(
    st.booleans() | st.integers(-5, 1 << 70) | st.floats() | TEXT | st.dates() | st.times() | st.datetimes(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6,
)
"""Anything a TOML file can hold."""


def changed(key: str) -> Any:
    """A value other than the default that the key's type allows."""
    kind, default = keys()[key], get(RunConfig(), key)
    if kind.base == "list":
        assert kind.item is not None
        if key == "islands":
            return [IslandTable(id=0, name="n", site="s", nodes=2, ranks=4, settings={"training.gc_freq": 9})]
        if kind.item.base == "choice":
            return [kind.item.choices[-1]]
        return {"table": [DataSource(path="p", weight=2.0, prepare_from="q")], "list": [["m"]]}.get(
            kind.item.base, ["m", "n"]
        )
    if kind.base == "choice":
        return next((c for c in kind.choices if c != default), kind.choices[0])
    if kind.base == "bool":
        return not default
    if key in SHIPPED:
        return next((name for name in SHIPPED[key] if name != default), f"{default}x")
    return f"{default}x" if kind.base == "str" else (default or 0) + (4 if kind.base == "int" else 0.25)
