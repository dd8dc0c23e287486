"""Why the hub does not do what it is asked. None of it changes the hub's state."""

from typing import Literal

Kind = Literal["malformed", "refused", "stranger", "gone", "forbidden", "busy"]
"""malformed: no message of ours. refused: for good, the user has to put something right. stranger: who asks is no member
(any more) and has to join. gone: what is asked for is no longer held. forbidden: the token is missing, wrong, or another's.
busy: later, perhaps."""


class Refusal(Exception):
    """The reason, in words for the island's user."""

    def __init__(self, kind: Kind, reason: str) -> None:
        super().__init__(reason)
        self.kind = kind


class Busy(Refusal):
    """To be asked again after some seconds."""

    def __init__(self, reason: str, retry_s: float) -> None:
        super().__init__("busy", reason)
        self.retry_s = retry_s
