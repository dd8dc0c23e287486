"""The two ways a command ends that are not success and not a defect."""


class UserError(Exception):
    """Wrong usage or configuration: the message names the setting and the remedy; commands print it and exit 2."""


class Resumable(Exception):
    """Stopped early with durable state (walltime, drain); commands exit 75."""
