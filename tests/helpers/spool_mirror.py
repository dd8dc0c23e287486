"""The mirror of a spool, as a thread: copies both ways in rounds, late and in any order, as rsync with --delete does."""

import os
import random
import shutil
import threading
from pathlib import Path


class Mirror:
    """hub, island: the two copies. seconds: from one round to the next. hurt: may damage a copy (source, target)."""

    def __init__(self, hub: Path, island: Path, seconds: float = 0.5, seed: int = 0) -> None:
        self.hub, self.island, self.seconds = hub, island, seconds
        self.down = False  # the site is out of reach
        self._random = random.Random(seed)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True, name="mirror")

    def __enter__(self) -> "Mirror":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(self.seconds):
            if not self.down:
                self.turn()

    def turn(self) -> None:
        self.copy(self.island / "up", self.hub / "up")
        self.copy(self.hub / "down", self.island / "down")

    def copy(self, source: Path, target: Path) -> None:
        there = files(source)
        new = sorted(there - files(target))
        self._random.shuffle(new)
        for name in new:
            path = target / name
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary = path.with_name(f".{path.name}.copy")
            try:
                shutil.copyfile(source / name, temporary)
            except FileNotFoundError:
                continue
            os.replace(temporary, path)
        for name in files(target) - there:
            (target / name).unlink(missing_ok=True)


def files(folder: Path) -> set[str]:
    """Relative names of all files but those in the making."""
    found = {str(path.relative_to(folder)) for path in folder.rglob("*") if not path.is_dir()}
    return {name for name in found if not Path(name).name.startswith(".")}
