"""How a slot ended, as everybody who took part in it knows it."""

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Settlement:
    """participants, weights: whose deltas were merged, and how much each counted. tokens: of those deltas.

    positions, skipped: by island, how far streams are settled, and up to where their samples are passed over. members:
    everybody who takes the result, with the shards they hold. contested: see ``policy.Roll``. present: the islands that were
    there when it ended.
    """

    slot: int
    status: str
    participants: tuple[int, ...] = ()
    weights: tuple[float, ...] = ()
    tokens: int = 0
    positions: dict[int, dict[str, int]] = field(default_factory=dict)
    skipped: dict[int, dict[str, int]] = field(default_factory=dict)
    members: dict[int, dict[str, str]] = field(default_factory=dict)
    contested: tuple[int, ...] = ()
    present: tuple[int, ...] = ()
    reason: str = ""

    @property
    def advanced(self) -> dict[str, int]:
        """How far the streams are that a committed slot settles, whether their samples count or are passed over."""
        return {name: end for positions in self.positions.values() for name, end in positions.items()}
