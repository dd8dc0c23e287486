"""How long the hub waits for whom."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Rules:
    """Seconds: lease_s, hang_s as in ``Seats``. wait_s: from a slot's first header until it goes on without the others'."""

    lease_s: float = 5.0
    hang_s: float = 600.0
    wait_s: float = 3600.0
