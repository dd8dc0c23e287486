"""What TorchTitan's own dataclasses refuse, in terms of our settings."""

from collections.abc import Iterator
from contextlib import contextmanager

from torchtitan_diloco.errors import UserError


@contextmanager
def refused_by_torchtitan(section: str = "") -> Iterator[None]:
    """Checks in TorchTitan's dataclasses are about settings: pass their wording on as a `UserError`."""
    ours = {"profiler": "profiling", "validator": "validation"}.get(section, section)
    try:
        yield
    except (ValueError, AssertionError, ImportError) as e:
        text = f"[{ours}]: {e}" if ours and "." not in ours else f"{ours}: {e}" if ours else str(e)
        raise UserError(f"{text} (refused by TorchTitan)") from e
