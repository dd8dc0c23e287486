"""What islands say to one another on the control path, as plain values with a JSON form."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from torchtitan_diloco.outer.outcome import Settlement
from torchtitan_diloco.outer.policy import Header, Member
from torchtitan_diloco.outer.state import Advance

Status = Literal["committed", "void", "undecided", "failed", "behind"]


@dataclass(frozen=True, slots=True)
class Epoch:
    """A membership everybody in it agrees on. ``id`` is never used twice in a run."""

    id: str
    members: tuple[Member, ...]

    def islands(self) -> tuple[int, ...]:
        return tuple(member.island for member in self.members)


@dataclass(frozen=True, slots=True)
class Announce:
    """Header of the sender for a slot under an epoch.

    serial: orders the sender's announcements. floor: the sender will not attempt slots below it any more.
    """

    epoch: str
    slot: int
    serial: int
    floor: int
    header: Header


@dataclass(frozen=True, slots=True)
class Confirm:
    """The sender has merged, digest: of what came out; or it leaves this attempt (None, with a reason)."""

    epoch: str
    slot: int
    digest: str | None
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Ask:
    """What became of the attempt of ``slot`` under ``epoch``?"""

    epoch: str
    slot: int


@dataclass(frozen=True, slots=True)
class Answer:
    """The sender's knowledge of that attempt.

    committed: with this digest. void: the sender has not confirmed it and never will. undecided: confirmed, outcome
    unknown. failed: the slot was given up. behind: the slot was committed without the asker.
    """

    epoch: str
    slot: int
    status: Status
    digest: str = ""


Message = Announce | Confirm | Ask | Answer
_KINDS: dict[str, type[Message]] = {"announce": Announce, "confirm": Confirm, "ask": Ask, "answer": Answer}
_NAMES = {cls: name for name, cls in _KINDS.items()}


def to_json(message: Message) -> dict[str, Any]:
    return {"kind": _NAMES[type(message)], **asdict(message)}


def from_json(data: Mapping[str, Any]) -> Message:
    """Raises ValueError when ``data`` is not a well-formed message."""
    values = dict(data)
    cls = _KINDS.get(str(values.pop("kind", None)))
    try:
        if cls is None:
            raise ValueError(f"unknown kind of message {data.get('kind')!r}")
        if cls is Announce:
            values["header"] = Header.from_json(values["header"])
        message = cls(**values)
    except (TypeError, KeyError) as error:
        raise ValueError(f"malformed message: {error}") from error
    if not isinstance(message.slot, int) or not isinstance(message.epoch, str):
        raise ValueError(f"malformed message: slot {message.slot!r}, epoch {message.epoch!r}")
    return message


@dataclass(frozen=True, slots=True)
class Outcome(Settlement):
    """How a slot ended for this island.

    committed: ``advance`` is in force. failed: nothing changed, try at the next slot. behind: others
    hold a history this island lacks; heal before going on. withdrawn: given up on this island's own wish.
    """

    status: Literal["committed", "failed", "behind", "withdrawn"]
    advance: Advance | None = None
    exchange_s: float = 0.0
    bytes_sent: int = 0
    bytes_received: int = 0
