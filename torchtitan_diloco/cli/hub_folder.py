"""Whose the folder of a hub's state is: a hub that went on from another run's would give its islands that run's weights."""

import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from torchtitan_diloco.config.schema import RunConfig
from torchtitan_diloco.durable import write_whole
from torchtitan_diloco.errors import UserError, unwritable

OWNER = "run.json"
STATE, JOURNAL = "state.json", "journal.jsonl"
_CONTENT = (OWNER, STATE, JOURNAL, "epoch", "parts")


@dataclass(frozen=True, slots=True)
class Owner:
    """The run whose state a folder holds. run_id: of the islands; for a hub started by hand, its name."""

    run_id: str
    name: str


def folder_of(config: RunConfig) -> Path:
    """Of the hub's durable state."""
    return Path(config.syncer.dir or Path(config.job.dump_folder) / config.job.name / "syncer")


def owner_of(folder: Path) -> Owner | None:
    """None where there is no state that a hub could go on from, or nothing says whose it is."""
    journal, state = folder / JOURNAL, folder / STATE
    if not state.exists() and not (journal.exists() and journal.stat().st_size > 0):
        return None
    try:
        said = json.loads((folder / OWNER).read_bytes())
        return Owner(str(said["run_id"]), str(said["name"]))
    except (OSError, ValueError, KeyError, TypeError):
        pass
    try:  # of a hub from before there was such a file
        run_id = str(json.loads(state.read_bytes())["terms"]["run_id"])
        return Owner(run_id, run_id)
    except (OSError, ValueError, KeyError, TypeError):
        return None


def claim(folder: Path, run_id: str, name: str) -> None:
    """Write down that the state here is of this run from now on.

    A hub started by hand knows the run by its name only, and so takes over what a hub of `run` has left for it, and the
    other way round. Raises UserError where the state is another run's, or the folder cannot be written.
    """
    try:
        owner = owner_of(folder)
        if owner and owner.run_id not in (run_id, name) and not (run_id == name == owner.name):
            raise UserError(
                f"syncer.dir: {folder} holds the hub's state of run {owner.name} ({owner.run_id}), not of {name} "
                f"({run_id}); give syncer.dir another folder, or move that one away: islands bring the run's state with them"
            )
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(folder / OWNER, [json.dumps(asdict(Owner(run_id, name))).encode() + b"\n"])
    except OSError as error:
        raise unwritable(folder, error, "syncer.dir") from None


def set_aside(folder: Path, known: set[str], now: float) -> str:
    """Move what a hub has left for a run of none of these ids to a folder of its own in ``folder``.

    Returns a sentence for people, or "" where there was nothing. Raises UserError where the disk refuses.
    """
    try:
        owner = owner_of(folder)
        if owner is None or owner.run_id in known:
            return ""
        stamp = time.strftime("%Y%m%d-%H%M%S", time.localtime(now))
        aside = folder / f"earlier.{stamp}"
        count = 1
        while aside.exists():
            count += 1
            aside = folder / f"earlier.{stamp}-{count}"
        aside.mkdir()
        # The manifest first: without it nobody goes on from the rest.
        for name in (STATE, *(name for name in _CONTENT if name != STATE)):
            if (folder / name).exists():
                (folder / name).rename(aside / name)
    except OSError as error:
        raise UserError(
            f"syncer.dir: what an earlier run has left in {folder} cannot be moved aside: "
            f"{error.strerror}; give syncer.dir another folder"
        ) from None
    return f"syncer.dir holds the hub's state of another run ({owner.run_id}); moved aside to {aside}"
