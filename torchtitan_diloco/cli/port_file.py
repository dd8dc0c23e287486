"""A file that tells which port a server has taken."""

import os
from pathlib import Path

from torchtitan_diloco.errors import UserError


def write_port(path: Path, port: int | str) -> None:
    """Whole or not at all. Raises UserError when it cannot be written."""
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        unfinished.write_text(f"{port}\n")
        unfinished.replace(path)
    except OSError as error:
        raise UserError(
            f"--port-file {path}: cannot be written: {error.strerror}; give a writable path"
        ) from None
