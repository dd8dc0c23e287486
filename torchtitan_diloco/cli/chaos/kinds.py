"""The sorts of faults."""

from typing import Literal

Kind = Literal["kill", "freeze", "walltime", "meeting", "cut", "slow", "nan", "disk_full"]
"""kill: SIGKILL to all processes of an island. freeze: SIGSTOP. walltime: SIGTERM to its trainers, which save and leave.
meeting: SIGKILL to what all meet at, Lighthouse or hub. cut: nothing passes between an island and the hub, and nobody is
told. slow: little passes. nan: a weight of an island becomes NaN. disk_full: no file of an island's trainers can grow."""

EVERYBODY = ("meeting",)
NEED_HUB = ("cut", "slow")
"""Each island's way to the hub leads through a process of its own, which can be stopped; gloo islands dial one another."""
