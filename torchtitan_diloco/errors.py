"""The two ways a command ends that are not success and not a defect."""

import errno
from pathlib import Path


class UserError(Exception):
    """Wrong usage or configuration: the message names the setting and the remedy; commands print it and exit 2."""


class Resumable(Exception):
    """Stopped early with durable state (walltime, drain); commands exit 75."""


def unwritable(path: Path, error: OSError, setting: str = "job.dump_folder") -> UserError:
    """The one sentence for a folder of a run, an island or a hub that cannot be written."""
    why = (
        "the disk is full"
        if error.errno in (errno.ENOSPC, errno.EDQUOT)
        else (error.strerror or str(error)).lower()
    )
    return UserError(
        f"{setting}: cannot write {path}: {why}; free some space or set {setting} to a writable folder"
    )
