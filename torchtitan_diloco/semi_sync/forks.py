"""A history that was not the run's is put aside and named, before an island takes the run's state in its place."""

import logging
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from torchtitan_diloco.checkpoint.manager import write_outer
from torchtitan_diloco.errors import UserError
from torchtitan_diloco.exchange.transport import Joined
from torchtitan_diloco.observe.events import Trace
from torchtitan_diloco.outer.history import have_parted, tokens_of
from torchtitan_diloco.outer.state import OuterState

logger = logging.getLogger(__name__)

FOLDER = "forks"
"""In the island's folder; nothing in it is ever pruned."""

Saved = tuple[Mapping[str, Any], Mapping[str, torch.Tensor]]
"""As a method's ``state`` gives it."""


def keeping(
    enter: Callable[[int], Joined],
    step: int,
    outer: OuterState | None,
    state: Callable[[], Saved],
    trace: Trace,
) -> Joined:
    """``enter(step)``, which may make ``outer`` another island's state. state: all that the island holds now."""
    assert outer is not None
    if outer.tokens_total == 0:  # there is nothing to keep, and no memory is held for it
        return enter(step)
    before = state()
    joined = enter(step)
    put_aside(before, outer.describe(), trace)
    return joined


def put_aside(before: Saved, now: Mapping[str, Any], trace: Trace) -> None:
    """Keep what the island held ``before`` if its history and that of ``now`` (an outer state's description) have parted.

    Written are its outer state and, as links, the newest checkpoint. Raises UserError where that cannot be written: the
    island may hold the only copy.
    """
    mine = before[0]["outer"]
    if trace.folder is None or not have_parted(mine, now):
        return
    lineage = "".join(entry["lineage"][:4] for entry in mine["fragments"])[:12]
    kept = trace.folder / FOLDER / f"slot-{mine['slot']}-{lineage}"
    checkpoint = _newest_checkpoint(trace.folder)
    try:
        if not (kept / "outer.json").exists():  # it was put aside before, by a start that came no further
            if checkpoint is not None:
                shutil.copytree(checkpoint, kept / checkpoint.name, copy_function=_link, dirs_exist_ok=True)
            write_outer(kept, dict(before[0]), dict(before[1]))
    except OSError as error:
        raise UserError(
            f"island {trace.island} has a history of its own, which is to be kept in {kept} before it takes the run's, and "
            f"that cannot be written ({error.strerror}); make room there (job.dump_folder), or move the island's folder away"
        ) from error
    message = (
        f"island {trace.island} holds a history (slot {mine['slot']}, {tokens_of(mine)} committed tokens) that has parted "
        f"from the run's (slot {now['slot']}, {tokens_of(now)} committed tokens), or is too old to tell; it goes on from the "
        f"run's, and its own is kept in {kept}"
    )
    logger.warning("%s", message)
    trace.event("error", kind="fork", message=message)


def _newest_checkpoint(folder: Path) -> Path | None:
    """The newest whole checkpoint of the island, wherever below its folder checkpoint.folder is."""
    found = [
        path.parent
        for path in folder.rglob("step-*/.metadata")
        if FOLDER not in path.relative_to(folder).parts and path.parent.name[len("step-") :].isdigit()
    ]
    return max(found, key=lambda path: int(path.name[len("step-") :]), default=None)


def _link(source: str, target: str) -> None:
    """Files of a checkpoint are never changed in place, so a second name costs nothing; not every file system has them."""
    if os.path.exists(target):
        return
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
