"""How long the hub waits for whom."""

from dataclasses import dataclass

HOUR_S = 3600.0
WINDOWS = (
    2.0  # of an island that is waited for: one for the window that it is in, one for what may slow it down
)


@dataclass(frozen=True, slots=True)
class Rules:
    """Seconds: lease_s, hang_s as in ``Seats``. wait_s: from a slot's first header until it goes on without the others'.

    windows: but not before this many windows of the slowest of them, by the pace that it has shown; 0 = whatever that is.
    """

    lease_s: float = 5.0
    hang_s: float = 600.0
    wait_s: float = HOUR_S
    windows: float = 0.0

    def patience_s(self, window_s: float) -> float:
        """For how long a slot waits for islands of which the slowest takes so long from one slot to the next."""
        return max(self.wait_s, self.windows * window_s)
