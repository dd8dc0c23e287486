"""What the hub says of itself to people. No tensors, no settings, nobody's token."""

from typing import Any

from torchtitan_diloco.hub.hub import Hub

LAST = 10  # settled slots that are shown


def status_of(hub: Hub) -> dict[str, Any]:
    """JSON. Seconds are those on the hub's clock."""
    state, now = hub.state, hub.now()
    workers = hub.workshop.describe()
    return ({"workers": workers} if workers else {}) | {
        "epoch": hub.store.epoch,
        "step": hub.step,
        "slot": state.slot if state else None,
        "islands": [
            {
                "island": seat.member.island,
                "incarnation": seat.member.incarnation,
                "phase": seat.phase.value,
                "why": seat.why,
                "step": seat.step,
                "slot": seat.slot,
                "heard_s": round(now - seat.heard, 1),
                "idle_s": round(seat.idle_s, 1),
            }
            for seat in hub.seats.all()
        ],
        "open": [
            {
                "slot": slot.slot,
                "fragment": slot.fragment,
                "began_s": round(now - slot.began, 1),
                "heard": sorted(slot.by_island()),
                "phase": "headers" if slot.roll is None else "merge" if slot.merging else "payloads",
            }
            for _, slot in sorted(hub.open.items())
        ],
        "last": [
            {
                "slot": record.slot,
                "status": record.status,
                "participants": list(record.participants),
                "tokens": record.tokens,
                "reason": record.reason,
            }
            for _, record in sorted(hub.records.items())[-LAST:]
        ],
        "fragments": [
            {"version": held.version, "digest": held.digest, "tokens": held.tokens, "lineage": held.lineage}
            for held in (state.states if state else ())
        ],
    }
