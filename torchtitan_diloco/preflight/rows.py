"""Rows, and the probes that find them side by side in a limited time."""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from torchtitan_diloco.errors import UserError

Outcome = Literal["ok", "warn", "fail"]
Way = Literal["out", "in", "here"]


@dataclass(frozen=True, slots=True)
class Row:
    """name: of what was looked at. way: in which direction the first packet goes. place: an address, or a path.

    seen: what was found, in words. remedy: what to do about it, where something is to be done.
    """

    name: str
    way: Way
    place: str
    outcome: Outcome
    seen: str
    remedy: str = ""


@dataclass(frozen=True, slots=True)
class Probe:
    """look: finds the rows, given the second (monotonic) at which it is over.

    The rest is said of a probe that is not over by then, or that raises UserError.
    """

    name: str
    way: Way
    place: str
    remedy: str
    look: Callable[[float], list[Row]]

    def row(self, outcome: Outcome, seen: str, remedy: str | None = None) -> Row:
        """Of this probe. remedy: another than its own; none is said where all is well."""
        said = self.remedy if remedy is None else remedy
        return Row(self.name, self.way, self.place, outcome, seen, "" if outcome == "ok" else said)


def look(probes: Sequence[Probe], until: float, began: float | None = None) -> list[Row]:
    """The rows of all probes, in their order, whatever some of them hang on."""
    began = time.monotonic() if began is None else began
    found: dict[int, list[Row]] = {}
    defects: list[BaseException] = []

    def run(number: int, probe: Probe) -> None:
        try:
            found[number] = probe.look(until)
        except UserError as error:
            seen, _, remedy = str(error).rpartition("; ")
            found[number] = [probe.row("fail", seen or str(error), remedy if seen else None)]
        except BaseException as error:  # noqa: BLE001 - raised below
            defects.append(error)

    # Daemons: a name server that does not answer holds a thread for longer than anybody wants to wait.
    threads = [
        threading.Thread(target=run, args=(number, probe), daemon=True, name=f"probe-{probe.name}")
        for number, probe in enumerate(probes)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, until - time.monotonic()))
    if defects:
        raise defects[0]
    late = f"no answer within {until - began:.0f} s"
    rows = (found.get(number) or [probe.row("fail", late)] for number, probe in enumerate(probes))
    return [row for each in rows for row in each]
