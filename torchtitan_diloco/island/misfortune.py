"""Ends of training that are no defects and no mistakes of the configuration, each in one sentence: worth another start."""

import errno
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
FAILED_WRITE = re.compile(r"PytorchStreamWriter failed writing|file write failed")
"""How torch's writer of zip files says that a write failed, without the reason (2.14.1)."""
NOT_FINITE = re.compile(r"Loss is not finite .* at step (\d+)")
"""TorchTitan 0.3.0, ``trainer.py``."""


@dataclass(frozen=True, slots=True)
class Misfortune:
    kind: str
    sentence: str


def misfortune(error: BaseException, folder: Path) -> Misfortune | None:
    """What has ended training, for people; None for what may be a defect. folder: of the island."""
    for cause in _causes(error):
        if (isinstance(cause, OSError) and cause.errno in FULL) or FAILED_WRITE.search(str(cause)):
            return Misfortune(
                "disk",
                f"job.dump_folder: cannot write to {folder}: the disk is full; free some space there, and this island goes "
                "on from its last checkpoint",
            )
        if found := NOT_FINITE.search(str(cause)):
            return Misfortune(
                "loss",
                f"the loss of step {found[1]} is not finite; this island goes on from the others' state or its last "
                "checkpoint; if it comes back to this, lower optimizer.lr or semi_sync.outer.lr, and have its node tested",
            )
    return None


def _causes(error: BaseException) -> Iterator[BaseException]:
    """The error, what it came from, and what happened on the ranks where it stands for several (``CheckpointException``)."""
    seen: set[int] = set()
    ahead: list[BaseException] = [error]
    while ahead:
        cause = ahead.pop()
        if id(cause) in seen:
            continue
        seen.add(id(cause))
        yield cause
        failures = getattr(cause, "failures", {})
        ahead += (
            [f[0] for f in failures.values() if isinstance(f, tuple)] if isinstance(failures, dict) else []
        )
        ahead += [e for e in (cause.__cause__, cause.__context__) if e is not None]
