"""What a chaos run does to its islands, and when: faults as plain values, scripted or drawn from a seed."""

import tomllib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, get_args

from torchtitan_diloco.cli.chaos.kinds import EVERYBODY, NEED_HUB, Kind
from torchtitan_diloco.errors import UserError

KINDS: tuple[str, ...] = get_args(Kind)
SHORTEST_S, LONGEST_S = 2.0, 15.0
"""How long a drawn fault lasts where the plan does not say."""


@dataclass(frozen=True, slots=True, order=True)
class Fault:
    """at_s: seconds after every island has committed a slot. lasts_s: until it is lifted, or until who died is started
    again. island: None for what all of them meet at."""

    at_s: float
    kind: Kind
    island: int | None
    lasts_s: float


@dataclass(frozen=True, slots=True)
class Plan:
    """duration_s: after which the run is stopped in good order. slow_mbit: what a slow link carries, each way."""

    faults: tuple[Fault, ...]
    duration_s: float
    seed: int
    slow_mbit: float

    @property
    def needs_hub(self) -> bool:
        return any(fault.kind in NEED_HUB for fault in self.faults)


def load_plan(path: Path, islands: Collection[int], *, seed: int | None = None) -> Plan:
    """seed: in place of the file's. Raises UserError, naming the key, for a file that is no plan for these islands."""
    try:
        text = path.read_text(encoding="utf-8")
        data = tomllib.loads(text)
    except OSError as error:
        raise UserError(f"--plan {path}: cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"--plan {path}: is no TOML: {error}") from None
    reader = _Reader(str(path))
    reader.known(data, ("duration_s", "seed", "slow_mbit", "faults", "random"), "")
    duration_s = reader.number(data, "duration_s", "")
    if duration_s is None:
        raise UserError(f"--plan {path}: duration_s is missing; give the seconds that the run is to last")
    drawn_seed = data.get("seed", 0) if seed is None else seed
    if not isinstance(drawn_seed, int) or isinstance(drawn_seed, bool):
        raise UserError(f"--plan {path}: seed = {drawn_seed!r}: give a whole number")
    faults = reader.scripted(data.get("faults", []), islands, duration_s)
    if (random := data.get("random")) is not None:
        faults += reader.drawn(random, islands, duration_s, drawn_seed)
    slow_mbit = reader.number(data, "slow_mbit", "", 1.0)
    assert slow_mbit is not None
    return Plan(tuple(sorted(faults, key=lambda f: f.at_s)), duration_s, drawn_seed, slow_mbit)


def draw(
    count: int,
    kinds: Sequence[Kind],
    lasts_s: tuple[float, float],
    islands: Sequence[int],
    duration_s: float,
    seed: int,
) -> list[Fault]:
    """``count`` faults of a Poisson process: given their number, their moments are independent and uniform."""
    random = Random(f"chaos-{seed}")
    faults = []
    for _ in range(count):
        kind = random.choice(kinds)
        island = None if kind in EVERYBODY else random.choice(islands)
        faults.append(Fault(random.uniform(0, duration_s), kind, island, random.uniform(*lasts_s)))
    return faults


class _Reader:
    """Reads tables of a plan; what is wrong is an error that names file and key."""

    def __init__(self, path: str) -> None:
        self._path = path

    def known(self, table: Any, keys: Sequence[str], where: str) -> None:
        if not isinstance(table, Mapping):
            raise UserError(f"--plan {self._path}: {where or 'it'} is no table")
        for key in table:
            if key not in keys:
                raise UserError(f"--plan {self._path}: {where}{key} is no key; there are {', '.join(keys)}")

    def number(
        self, table: Mapping[str, Any], key: str, where: str, default: float | None = None
    ) -> float | None:
        """A number above 0, of seconds or Mbit/s."""
        value = table.get(key, default)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e7:
            raise UserError(f"--plan {self._path}: {where}{key} = {value!r}: give a number above 0")
        return float(value)

    def kind(self, value: Any, where: str) -> Kind:
        if value not in KINDS:
            raise UserError(f"--plan {self._path}: {where} = {value!r}: give one of {', '.join(KINDS)}")
        kind: Kind = value
        return kind

    def scripted(self, tables: Any, islands: Collection[int], duration_s: float) -> list[Fault]:
        if not isinstance(tables, list):
            raise UserError(f"--plan {self._path}: faults are tables: write [[faults]]")
        faults = []
        for i, table in enumerate(tables):
            where = f"faults[{i}]."
            self.known(table, ("at_s", "kind", "island", "lasts_s"), where)
            kind = self.kind(table.get("kind"), f"{where}kind")
            at_s = self.number(table, "at_s", where)
            if at_s is None or at_s >= duration_s:
                raise UserError(
                    f"--plan {self._path}: {where}at_s = {at_s}: give seconds from 0 to duration_s ({duration_s:g})"
                )
            island = table.get("island")
            if kind in EVERYBODY and island is not None:
                raise UserError(f"--plan {self._path}: {where}island: {kind} is no island's; leave it out")
            if kind not in EVERYBODY and (isinstance(island, bool) or island not in islands):
                raise UserError(
                    f"--plan {self._path}: {where}island = {island!r}: give one of {sorted(islands)}"
                )
            lasts_s = self.number(table, "lasts_s", where, SHORTEST_S)
            assert lasts_s is not None
            faults.append(Fault(at_s, kind, island, lasts_s))
        return faults

    def drawn(self, table: Any, islands: Collection[int], duration_s: float, seed: int) -> list[Fault]:
        self.known(table, ("count", "kinds", "lasts_s"), "random.")
        count = table.get("count")
        if not isinstance(count, int) or isinstance(count, bool) or not 0 < count <= 10_000:
            raise UserError(
                f"--plan {self._path}: random.count = {count!r}: give a whole number from 1 to 10000"
            )
        kinds = table.get("kinds", ["kill", "freeze", "walltime", "meeting"])
        if not isinstance(kinds, list) or not kinds:
            raise UserError(
                f"--plan {self._path}: random.kinds = {kinds!r}: give a list of {', '.join(KINDS)}"
            )
        checked = [self.kind(kind, "random.kinds") for kind in kinds]
        lasts = table.get("lasts_s", [SHORTEST_S, LONGEST_S])
        if (
            not isinstance(lasts, list)
            or len(lasts) != 2
            or any(isinstance(x, bool) or not isinstance(x, int | float) for x in lasts)
            or not 0 < lasts[0] <= lasts[1]
        ):
            raise UserError(
                f"--plan {self._path}: random.lasts_s = {lasts!r}: give [shortest, longest] in seconds"
            )
        return draw(count, checked, (float(lasts[0]), float(lasts[1])), sorted(islands), duration_s, seed)
