"""The command line in a fresh process that may not load what is slow to import."""

import subprocess
import sys
from pathlib import Path

CODE = """
import sys
from torchtitan_diloco.cli import dispatch
code = dispatch(["validate", {file!r}])
heavy = {{"torch", "numpy", "torchtitan", "torchft", "datasets"}} & set(sys.modules)
sys.exit(f"imported {{heavy}}" if heavy else code)
"""


def validate(file: Path, timeout_s: float) -> "subprocess.CompletedProcess[str]":
    """``validate FILE``; fails with what was imported when that includes torch or its like."""
    command = [sys.executable, "-c", CODE.format(file=str(file))]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
