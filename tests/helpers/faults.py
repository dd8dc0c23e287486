"""Faults planted in our own code, to see that a test notices them.

A fault is a change of one place in a module's source. Its function (or the module's constant) then gets the changed code in
place, so that whoever imported it before runs it too. A place that is no longer there fails the test: move the fault, do
not drop it.
"""

import inspect
import types
from dataclasses import dataclass
from typing import Generic, TypeVar

import pytest

T = TypeVar("T")


@dataclass(frozen=True)
class Fault(Generic[T]):
    """case: what it takes to see the fault, in the words of the test that plants it."""

    name: str
    module: types.ModuleType
    place: str
    instead: str
    case: T

    def __str__(self) -> str:
        return self.name


def functions(module: types.ModuleType) -> dict[str, types.FunctionType]:
    """The module's own functions and methods, by qualified name."""
    own = [value for value in vars(module).values() if getattr(value, "__module__", "") == module.__name__]
    members = [m for value in own if isinstance(value, type) for m in vars(value).values()]
    unwrapped = [inspect.unwrap(getattr(value, "__func__", value)) for value in [*own, *members]]
    return {f.__qualname__: f for f in unwrapped if isinstance(f, types.FunctionType)}


def codes(code: types.CodeType) -> dict[str, types.CodeType]:
    """All code objects inside a module's, by qualified name."""
    inner = [c for c in code.co_consts if isinstance(c, types.CodeType)]
    return {c.co_qualname: c for c in inner} | {name: c for i in inner for name, c in codes(i).items()}


def behaviour(code: types.CodeType) -> tuple:
    """What a code object does, without where it stands."""
    constants = tuple(behaviour(c) if isinstance(c, types.CodeType) else repr(c) for c in code.co_consts)
    return code.co_code, code.co_names, code.co_varnames, code.co_freevars, constants


def changed_constants(module: types.ModuleType, code: types.CodeType) -> dict[str, int | float | str]:
    """The module's numbers and strings that are others once ``code`` has run in its place."""
    namespace: dict[str, object] = {"__name__": module.__name__}
    exec(code, namespace)
    mine = vars(module)
    return {
        name: value
        for name, value in namespace.items()
        if isinstance(value, int | float | str) and name in mine and mine[name] != value
    }


def plant(fault: Fault, monkeypatch: pytest.MonkeyPatch) -> None:
    """Give the one function, or constant, that the fault's place is in the changed code."""
    source = inspect.getsource(fault.module)
    assert source.count(fault.place) == 1, (
        f"{fault.module.__name__} has {fault.place!r} {source.count(fault.place)} times"
    )
    code = compile(source.replace(fault.place, fault.instead), "planted", "exec")
    changed = codes(code)
    written = {
        name: f for name, f in functions(fault.module).items() if name in changed
    }  # not those of dataclass
    planted = [f for name, f in written.items() if behaviour(changed[name]) != behaviour(f.__code__)]
    if planted:
        assert len(planted) == 1, f"{fault.name} changes {planted}"
        monkeypatch.setattr(planted[0], "__code__", changed[planted[0].__qualname__])
    else:
        constants = changed_constants(fault.module, code)
        assert len(constants) == 1, f"{fault.name} changes {constants}"
        for name, value in constants.items():
            monkeypatch.setattr(fault.module, name, value)
