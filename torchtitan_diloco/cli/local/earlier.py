"""What becomes of a run that the folder already holds: continued, moved aside, or refused."""

from dataclasses import dataclass
from enum import Enum, auto

from torchtitan_diloco.cli.local.folder import DataIdentity, Earlier, RunFolder
from torchtitan_diloco.config.load import agreement, load_config
from torchtitan_diloco.config.schema import RunConfig
from torchtitan_diloco.errors import UserError


class Plan(Enum):
    NEW = auto()
    CONTINUE = auto()
    ASIDE = auto()
    REPLACE = auto()
    """Nothing was trained, so nothing is kept; else every corrected mistake would leave a folder behind."""


@dataclass(frozen=True, slots=True)
class Decision:
    """What to do, and one clause for people that says why."""

    plan: Plan
    why: str = ""
    earlier: Earlier | None = None


def decide(folder: RunFolder, config: RunConfig, *, fresh: bool) -> Decision:
    """Compare the folder's content with what is asked for; changes nothing.

    Raises UserError where the earlier run is unfinished, or has fewer steps, and settings that must agree with it do not.
    """
    if folder.is_empty():
        return Decision(Plan.NEW)
    if fresh:
        return Decision(Plan.ASIDE, f"{folder.path} holds an earlier run and --fresh is given")
    earlier = folder.earlier()
    if earlier is None:
        raise UserError(
            f"{folder.path} (job.dump_folder/job.name) is not empty and holds no run; "
            "give another job.name, or --fresh to move it aside"
        )
    if not earlier.begun:
        return Decision(
            Plan.REPLACE, f"{folder.path} holds a run that ended before its first inner step", earlier
        )
    before = load_config(earlier.config_file).config
    # Of its own number, not of the one asked for now.
    unfinished = earlier.unfinished(before.semi_sync.num_islands)
    if not unfinished and config.training.steps <= before.training.steps:
        return Decision(
            Plan.ASIDE, f"{folder.path} holds a run that is done at step {before.training.steps}", earlier
        )
    _require_agreement(
        before, config, f"{folder.path} holds {'an unfinished' if unfinished else 'a finished'} run"
    )
    if unfinished:
        which = ", ".join(map(str, unfinished))
        return Decision(
            Plan.CONTINUE,
            f"continuing the unfinished run in {folder.path} (not done: island {which})",
            earlier,
        )
    return Decision(
        Plan.CONTINUE,
        f"continuing the run in {folder.path} from step {before.training.steps} to {config.training.steps}",
        earlier,
    )


def require_same_data(earlier: Earlier, data: DataIdentity) -> None:
    """Raise UserError where a run would continue on another corpus than it began with."""
    if earlier.data.manifests != data.manifests:
        raise UserError(
            f"data.sources: the run in {earlier.config_file.parent} was trained on other sequences (manifest digests "
            f"{_short(earlier.data.manifests)}, now {_short(data.manifests)}); restore that corpus, give --fresh to "
            "move the run aside, or another --job.name"
        )


def _short(digests: list[str]) -> str:
    return ", ".join(digest[:10] for digest in digests) or "none"


def _require_agreement(before: RunConfig, now: RunConfig, holds: str) -> None:
    old, new = agreement(before), agreement(now)
    differing = [key for key in sorted(old.keys() | new.keys()) if old.get(key) != new.get(key)]
    # Islands must agree on these with one another, and do: all of them start again with the new ones.
    if now.training.steps > before.training.steps:
        differing.remove("training.steps")
    differing = [key for key in differing if key != "transport.streams"]
    if differing:
        changes = "; ".join(f"{key} was {old.get(key)!r}, is {new.get(key)!r}" for key in differing)
        raise UserError(
            f"{holds} with other settings ({changes}); set them back, "
            "give --fresh to move it aside, or another --job.name"
        )
