"""What a person sees of a local run: one live table on a terminal, plain lines elsewhere, the closing table."""

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from rich import box
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from torchtitan_diloco.cli.local.supervisor import Island, Phase
from torchtitan_diloco.observe.reading import Agreement, anchors

LIVE_EVERY_S = 0.5
PLAIN_EVERY_S = 5.0
SHORT = 10
"""Characters of a digest that people get to see."""
PLAIN_WIDTH = 110
"""Columns of a table in a file, where rich would take 80 and cut cells."""
_STYLE = {
    Phase.RUNNING: "green",
    Phase.DONE: "bold green",
    Phase.RESUME: "cyan",
    Phase.RESTARTING: "yellow",
    Phase.STOPPED: "yellow",
    Phase.FAILED: "bold red",
    Phase.FATAL: "bold red",
}


class View:
    """Shows islands while they run."""

    def __init__(
        self,
        console: Console,
        islands: Sequence[Island],
        *,
        header: str,
        steps: Mapping[int, int],
        now: Callable[[], float] = time.time,
    ) -> None:
        """steps: of each island, inner steps of its own in the whole run. header: shown above the table."""
        self._console = console
        self._islands = islands
        self._header = header
        self._steps = steps
        self._now = now
        self._began = now()
        self._shown = now()
        # No refresh thread: the launcher forks, and children are tied to the thread that forked them.
        self._live = Live(console=console, auto_refresh=False) if console.is_terminal else None

    def __enter__(self) -> "View":
        if self._live is not None:
            self._live.start()
        else:
            self.tell(self._header)
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._draw()
            self._live.stop()

    def tell(self, message: str) -> None:
        """One event, above the live table or as a line of its own."""
        say(self._console, message)

    def refresh(self) -> None:
        """Bring the picture up to date if it is time; on a plain stream one line per island."""
        if self._now() - self._shown < (LIVE_EVERY_S if self._live is not None else PLAIN_EVERY_S):
            return
        self._shown = self._now()
        if self._live is not None:
            self._draw()
        else:
            for island in self._islands:
                self.tell(self._line(island))

    def _draw(self) -> None:
        assert self._live is not None
        self._live.update(self._picture(), refresh=True)

    def _line(self, island: Island) -> str:
        cells = self._cells(island)
        return (
            f"[{self._elapsed()}] island {cells[0]} {cells[1]}: step {cells[2]}, loss {cells[3]}, {cells[4]} tokens/s, "
            f"slot {cells[5]}, stall {cells[6]}, restarts {cells[8]}"
            + (f", waits for {cells[7]}" if cells[7] else "")
        )

    def _cells(self, island: Island) -> list[str]:
        figures = island.figures
        speed = figures.tokens_per_second if island.phase is Phase.RUNNING else None
        return [
            str(island.number),
            island.phase.value,
            f"{figures.current_step}/{self._steps[island.number]}",
            number(figures.last_loss, ".4f"),
            number(speed, ",.0f"),
            number(figures.slot, "d"),
            number(figures.stall_share, ".1%"),
            "" if island.phase.over else figures.waiting,
            str(island.restarts),
        ]

    def _picture(self) -> Group:
        table = _table(
            "island", "state", "step", "loss", "tokens/s", "slot", "stall", "waiting for", "restarts"
        )
        for island in self._islands:
            cells = self._cells(island)
            style = _STYLE.get(island.phase, "")
            table.add_row(cells[0], Text(cells[1], style=style), *map(Text, cells[2:]))
        return Group(Text(f"{self._header} | {self._elapsed()}"), table)

    def _elapsed(self) -> str:
        minutes, seconds = divmod(int(self._now() - self._began), 60)
        return f"{minutes // 60}:{minutes % 60:02d}:{seconds:02d}"


def print_closing(console: Console, islands: Sequence[Island], agreement: Agreement, folder: Path) -> None:
    """The closing table from the islands' events, whether their anchors agree, and where everything lies."""
    table = _table(
        "island",
        "state",
        "steps",
        "tokens",
        "first\nloss",
        "last\nloss",
        "slots",
        "stall",
        "restarts",
        "anchor",
    )
    all_held = anchors({island.number: island.figures for island in islands})
    for island in islands:
        figures, digests = island.figures, all_held[island.number]
        last = max(digests, default=None)
        table.add_row(
            str(island.number),
            Text(island.phase.value, style=_STYLE.get(island.phase, "")),
            str(figures.step),
            f"{figures.tokens:,}",
            number(figures.first_loss, ".4f"),
            number(figures.last_loss, ".4f"),
            str(figures.committed),
            number(figures.stall_share, ".1%"),
            str(island.restarts),
            f"{digests[last][:SHORT]} @ {last}" if last is not None else "-",
        )
    console.print(table)
    if agreement.slot is not None and agreement.equal:
        say(console, f"anchors are equal at slot {agreement.slot}{_of_whom(all_held, agreement)}")
    elif agreement.slot is not None:
        held = ", ".join(f"island {i}: {digest[:SHORT]}" for i, digest in sorted(agreement.digests.items()))
        say(console, f"anchors DIFFER at slot {agreement.slot}: {held}", style="bold red")
    say(console, f"run folder: {folder}")


def _of_whom(all_held: Mapping[int, Mapping[int, str]], agreement: Agreement) -> str:
    """Nothing where every island ended at that slot: else it would read as if the one that was lost before had, too."""
    if all(max(digests, default=None) == agreement.slot for digests in all_held.values()):
        return ""
    whole = len(agreement.digests) == len(all_held)
    who = "all of them" if whole else f"islands {', '.join(map(str, sorted(agreement.digests)))}"
    return f", the last that {who} hold"


def make_console() -> Console:
    """Standard output: as wide as the terminal, or `PLAIN_WIDTH`."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=PLAIN_WIDTH)


def _table(*columns: str) -> Table:
    # As narrow as can be: ten columns have to fit a terminal of 80.
    table = Table(box=box.SIMPLE_HEAD, padding=0, show_edge=False)
    for name in columns:
        table.add_column(
            name, justify="left" if name in ("state", "waiting for", "anchor") else "right", overflow="fold"
        )
    return table


def say(console: Console, message: str, *, style: str | None = None) -> None:
    """Print text as it is: no markup, no colouring of its own, no wrapping (a path stays one word to copy)."""
    console.print(Text(message, style=style or ""), soft_wrap=True)


def number(value: float | None, form: str) -> str:
    """The formatted value, "-" where there is none."""
    return "-" if value is None else format(value, form)
