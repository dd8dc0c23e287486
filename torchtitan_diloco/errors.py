"""The two ways a command ends that are not success and not a defect."""

import errno
from pathlib import Path


class UserError(Exception):
    """Wrong usage or configuration: the message names the setting and the remedy; commands print it and exit 2."""


class Resumable(Exception):
    """Stopped early with durable state (walltime, drain); commands exit 75."""


def unwritable(path: Path, error: OSError) -> UserError:
    """The one sentence for a run's or an island's folder that cannot be written."""
    why = (
        "the disk is full"
        if error.errno in (errno.ENOSPC, errno.EDQUOT)
        else (error.strerror or str(error)).lower()
    )
    return UserError(
        f"job.dump_folder: cannot write {path}: {why}; free some space or set job.dump_folder to a writable folder"
    )
