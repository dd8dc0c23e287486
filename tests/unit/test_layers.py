"""Imports go downwards only, the pure and the fast layers stay pure and fast, and files stay short."""

import ast
from dataclasses import dataclass
from pathlib import Path

import pytest

PACKAGE = "torchtitan_diloco"
ROOT = Path(__file__).parents[2] / PACKAGE
MAX_LINES = 450

# Higher may import lower. Layers with the same number may not import one another, except SIDE ones.
RANK = {
    "cli": 10,
    "__main__": 11,
    "config_registry": 9,
    "train": 9,
    "configure": 8,
    "trainer": 7,
    "semi_sync": 6,
    "island": 5,
    "exchange": 4,
    "hub": 3,
    "data": 2,
    "checkpoint": 2,
    "config": 2,
    "observe": 2,
    "cpu": 2,
    "outer": 1,
    "process": 0,
    "durable": 0,
    "listening": 1,
    "address": 1,
    "preflight": 8,
    "errors": 0,
    "assets": 2,
    "__init__": 0,
}
SIDE = {"assets", "data", "checkpoint", "config", "observe", "cpu"}
FAST = ("config", "observe", "preflight", "cli", "errors", "__init__", "__main__")
SLOW_IMPORTS = {"torch", "torchtitan", "torchft", "torchdata", "datasets"}
PURE_FORBIDDEN = ("torch.distributed", "torchtitan", "torchft", "torchdata")


@dataclass(frozen=True)
class Import:
    """One imported dotted name, and whether it is imported when the module is (and not only for type checkers)."""

    name: str
    at_start: bool
    line: int


def imports_of(source: str, module: str) -> list[Import]:
    """All imports of a module, relative ones resolved; for ``from a import b`` both ``a`` and ``a.b``."""
    found: list[Import] = []
    package = module.split(".")[:-1]

    def visit(node: ast.AST, at_start: bool) -> None:
        if isinstance(node, ast.Import):
            found.extend(Import(alias.name, at_start, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            base = ".".join(part for part in (base, node.module) if part)
            found.append(Import(base, at_start, node.lineno))
            found.extend(Import(f"{base}.{alias.name}", at_start, node.lineno) for alias in node.names)
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            for child in node.body:
                visit(child, False)
            for child in node.orelse:
                visit(child, at_start)
            return
        lazy = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for child in ast.iter_child_nodes(node):
            visit(child, at_start and not lazy)

    visit(ast.parse(source), True)
    return found


def layer_of(name: str) -> str | None:
    """Top-level module or package of ours that a dotted name belongs to; None for a name that is not ours."""
    parts = name.split(".")
    if parts[0] != PACKAGE:
        return None
    return parts[1] if len(parts) > 1 and parts[1] in RANK else "__init__"


def upward(importer: str, imported: str) -> bool:
    if importer == imported:
        return False
    if {importer, imported} <= SIDE:
        return False
    return RANK[importer] <= RANK[imported]


def starts_with(name: str, prefixes: tuple[str, ...]) -> bool:
    return any(name == prefix or name.startswith(prefix + ".") for prefix in prefixes)


def module_name(path: Path) -> str:
    parts = [PACKAGE, *path.relative_to(ROOT).with_suffix("").parts]
    return ".".join(parts)


MODULES = {module_name(path): path for path in sorted(ROOT.rglob("*.py"))}
IMPORTS = {name: imports_of(path.read_text(), name) for name, path in MODULES.items()}


def find_module(name: str) -> str | None:
    """The module of ours that importing ``name`` runs, if it is one."""
    return next((m for m in (name, f"{name}.__init__") if m in MODULES), None)


def loaded_at_start(module: str) -> dict[str, str]:
    """Outside packages that importing ``module`` loads, each with the module of ours that asks for it."""
    outside: dict[str, str] = {}
    seen, todo = {module}, [module]
    while todo:
        current = todo.pop()
        for item in IMPORTS[current]:
            if not item.at_start:
                continue
            if layer_of(item.name) is None:
                outside.setdefault(item.name.split(".")[0], current)
                continue
            parts = item.name.split(".")
            for end in range(1, len(parts) + 1):
                target = find_module(".".join(parts[:end]))
                if target is not None and target not in seen:
                    seen.add(target)
                    todo.append(target)
    return outside


@pytest.mark.parametrize("module", MODULES)
def test_every_module_belongs_to_a_layer(module):
    assert module.split(".")[1] in RANK


@pytest.mark.parametrize("module", MODULES)
def test_imports_go_downwards(module):
    own = module.split(".")[1]
    wrong = [
        f"{MODULES[module]}:{item.line} imports {item.name}"
        for item in IMPORTS[module]
        if (target := layer_of(item.name)) is not None and upward(own, target)
    ]
    assert wrong == []


def test_side_layers_have_no_import_cycle_at_start():
    edges = {
        layer: {
            target
            for module, items in IMPORTS.items()
            if module.split(".")[1] == layer
            for item in items
            if item.at_start and (target := layer_of(item.name)) in SIDE - {layer}
        }
        for layer in SIDE
    }
    while leaves := [layer for layer, targets in edges.items() if not targets]:
        for leaf in leaves:
            del edges[leaf]
        for targets in edges.values():
            targets.difference_update(leaves)
    assert edges == {}


@pytest.mark.parametrize("module", [m for m in MODULES if m.split(".")[1] == "outer"])
def test_outer_knows_neither_process_groups_nor_torchtitan(module):
    assert [i.name for i in IMPORTS[module] if starts_with(i.name, PURE_FORBIDDEN)] == []


@pytest.mark.parametrize("module", [m for m in MODULES if m.split(".")[1] in FAST])
def test_configuration_and_commands_start_without_torch(module):
    assert {k: v for k, v in loaded_at_start(module).items() if k in SLOW_IMPORTS} == {}


@pytest.mark.parametrize("module", MODULES)
def test_a_file_can_be_read_in_one_sitting(module):
    assert len(MODULES[module].read_text().splitlines()) <= MAX_LINES


def test_the_check_itself_sees_what_it_must():
    source = """
import torch.distributed as dist
from typing import TYPE_CHECKING
from . import sibling
if TYPE_CHECKING:
    import torchtitan
class A:
    import numpy
def f():
    from torchtitan_diloco.exchange import gloo
"""
    seen = {(i.name, i.at_start) for i in imports_of(source, "torchtitan_diloco.outer.merge")}
    assert ("torch.distributed", True) in seen
    assert ("torchtitan_diloco.outer.sibling", True) in seen
    assert ("torchtitan", False) in seen
    assert ("numpy", True) in seen
    assert ("torchtitan_diloco.exchange.gloo", False) in seen
    assert upward("outer", "exchange") and upward("outer", "config") and upward("train", "config_registry")
    assert not upward("exchange", "outer") and not upward("config", "data")
    assert starts_with("torchtitan.trainer", PURE_FORBIDDEN) and not starts_with(
        "torchtitan_diloco", PURE_FORBIDDEN
    )
