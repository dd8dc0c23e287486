"""Which island reads which part of the data: a pure function of the outer state, so every member knows it of all others.

A source is cut into shards that are fixed for the run. A *stream* ("<source>/<shard>") is one shard read on and on, over
epochs; a position in it counts samples. Streams change hands at committed slots only, when everybody knows how far each
was read. One shard in ``RESERVE`` is left to nobody until the next slot, another one each time: an island that was not in
the last committed slot reads those, and what belongs to members that are not there, so it need not wait for its first
slot. If two read the same after all, ``policy.call_roll`` lets one of them count.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

RESERVE = 8

Holds = Mapping[str, str]
"""Shards that an island can read, by source: ``{"3f2a...": "0-63"}``; ranges joined by commas."""


def stream(source: str, shard: int) -> str:
    return f"{source}/{shard}"


def split(name: str) -> tuple[str, int]:
    """(source, shard) of a stream. Raises ValueError when it is not the name of one."""
    source, slash, shard = name.rpartition("/")
    if not slash or not source or not shard.isascii() or not shard.isdigit():
        raise ValueError(f"{name!r} is not the name of a stream")
    return source, int(shard)


def compact(shards: Iterable[int]) -> str:
    """``[0, 1, 2, 7]`` -> ``"0-2,7"``."""
    runs: list[list[int]] = []
    for shard in sorted(set(shards)):
        if runs and shard == runs[-1][1] + 1:
            runs[-1][1] = shard
        else:
            runs.append([shard, shard])
    return ",".join(f"{first}-{last}" if last > first else f"{first}" for first, last in runs)


def expand(ranges: str) -> list[int]:
    """The opposite of ``compact``, sorted. Raises ValueError for anything else."""
    shards: set[int] = set()
    for part in filter(None, ranges.split(",")):
        first, dash, last = part.partition("-")
        low, high = int(first), int(last if dash else first)
        if not 0 <= low <= high or high - low > 1 << 20:
            raise ValueError(f"{part!r} is not a range of shards")
        shards.update(range(low, high + 1))
    return sorted(shards)


def owners(members: Mapping[int, Holds | None], turn: int, assumed: Holds) -> dict[str, int]:
    """The member that reads each stream; streams in reserve (of sources with ``RESERVE`` shards or more) have none.

    members: islands of the last committed slot with what they hold, None where that is not known yet (at the founding),
    which counts as ``assumed``. turn: committed slots so far; shards move on by one member at each, so that islands of
    different speed do not drift apart in epochs.
    """
    held: dict[str, dict[int, list[int]]] = {}
    for island in sorted(members):
        holds = members[island]
        for source, ranges in (assumed if holds is None else holds).items():
            for shard in expand(ranges):
                held.setdefault(source, {}).setdefault(shard, []).append(island)
    return {
        stream(source, shard): islands[(shard + turn) % len(islands)]
        for source, shards in sorted(held.items())
        for shard, islands in sorted(shards.items())
        if len(shards) < RESERVE or shard % RESERVE != turn % RESERVE
    }


@dataclass(frozen=True, slots=True)
class Share:
    """The streams an island reads until the next committed slot. guest: in reserve, or of members who are not there."""

    streams: tuple[str, ...]
    guest: bool


def share_of(
    island: int,
    holds: Holds,
    members: Mapping[int, Holds | None],
    turn: int,
    present: Collection[int],
) -> Share:
    """What ``island`` reads. present: the islands it believes to be there; only guests are led by it."""
    owner = owners(members, turn, holds)
    held = {stream(source, shard) for source, ranges in holds.items() for shard in expand(ranges)}
    mine = tuple(name for name, member in owner.items() if member == island and name in held)
    if mine:
        return Share(mine, guest=False)
    guests = sorted(set(present) - set(owner.values()) | {island})
    orphans = [name for name, member in owner.items() if member not in present]
    # The reserve, and what nobody in the last slot held: a source that comes with a newcomer, for instance.
    orphans += sorted(held - owner.keys())
    return Share(
        tuple(n for n in orphans[guests.index(island) :: len(guests)] if n in held),
        guest=True,
    )
