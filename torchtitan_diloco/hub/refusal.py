"""Why the hub does not do what it is asked. None of it changes the hub's state."""

from typing import Literal

Kind = Literal["malformed", "refused", "stranger", "gone"]
"""malformed: no message of ours. refused: for good, the user has to put something right. stranger: who asks is no member
(any more) and has to join. gone: what is asked for is no longer held."""


class Refusal(Exception):
    """The reason, in words for the island's user."""

    def __init__(self, kind: Kind, reason: str) -> None:
        super().__init__(reason)
        self.kind = kind
