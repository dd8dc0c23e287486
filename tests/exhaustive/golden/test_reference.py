"""The reference that our runs are held against is written by itself."""

import ast
import sys
from pathlib import Path

import pytest

import tests.golden

FOLDER = Path(tests.golden.__file__).parent


@pytest.mark.parametrize("name", ["reference", "codec_reference", "slices_reference"])
def test_the_reference_imports_nothing_of_ours(name: str) -> None:
    nodes = list(ast.walk(ast.parse((FOLDER / f"{name}.py").read_text())))
    imported = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    imported |= {str(node.module) for node in nodes if isinstance(node, ast.ImportFrom)}
    assert "numpy" in imported
    foreign = {module for module in imported if module.split(".")[0] not in sys.stdlib_module_names}
    assert foreign <= {"numpy", "xxhash", "tests.golden.codec_reference", "tests.golden.slices_reference"}
