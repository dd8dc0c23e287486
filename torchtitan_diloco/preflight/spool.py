"""A folder that an outsider mirrors: whether files can be written there as messages are, and the mirror's last sign."""

import contextlib
import os
import time
from pathlib import Path

from torchtitan_diloco.config.schema import RunConfig
from torchtitan_diloco.preflight.rows import Probe, Row

LONG_S = 600.0
"""The mirror looks every few seconds, and the hub writes when it is spoken to."""


def spool_probes(config: RunConfig) -> list[Probe]:
    spool = config.transport.dir
    if not spool:
        remedy = "name the folder that is mirrored to the hub"
        empty = Row("spool", "here", "", "fail", "transport.dir is empty", remedy)
        return [Probe("spool", "here", "", remedy, lambda until: [empty])]
    folder = Path(spool)
    writes = Probe(
        "spool", "here", spool,
        "give transport.dir as a folder that this account may write, on a file system that all nodes of the island see",
        lambda until: [_write(writes, folder)],
    )  # fmt: skip
    down = folder / "down"
    mirror = Probe(
        "spool: mirror", "in", str(down),
        "start scripts/spool_mirror.sh on the machine of the hub, and see what it says",
        lambda until: [_mirror(mirror, down)],
    )  # fmt: skip
    return [writes, mirror]


def _write(probe: Probe, folder: Path) -> Row:
    """On the disk under another name, then renamed. Mirrors leave out what begins with a dot."""
    name = folder / f".preflight-{os.getpid()}"
    made = name.with_suffix(".made")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with open(made, "wb") as file:
            file.write(b"preflight\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(made, name)
        whole = name.read_bytes() == b"preflight\n"
    except OSError as error:
        return probe.row("fail", f"cannot be written: {error.strerror}")
    finally:
        for path in (made, name):
            with contextlib.suppress(OSError):
                path.unlink()
    return (
        probe.row("ok", "files can be written and renamed")
        if whole
        else probe.row("fail", "files do not come back whole")
    )


def _mirror(probe: Probe, down: Path) -> Row:
    """What comes down keeps the time at which the hub wrote it; the folder has that of the last file that came or went."""
    try:
        times = [entry.stat().st_mtime for entry in down.rglob("*") if not entry.name.startswith(".")]
        latest = max([down.stat().st_mtime, *times])
    except FileNotFoundError:
        return probe.row(
            "warn",
            "nothing has ever come down; fine before the first island starts, else the mirror stands",
        )
    except OSError as error:
        return probe.row("fail", f"cannot be read: {error.strerror}")
    age = max(0.0, time.time() - latest)
    seen = f"the last sign of it is {age:.0f} s old"
    return probe.row("ok" if age < LONG_S else "warn", seen)
