"""The durable trace of an island: ``events.jsonl`` (append-only) and ``state.json`` (how it stands now)."""

import json
import logging
import os
import time
from pathlib import Path
from typing import Any

from torchtitan_diloco.durable import open_lines

logger = logging.getLogger(__name__)

INCARNATION = "TORCHTITAN_DILOCO_INCARNATION"
"""Environment variable by which a launcher names this start of the island; without it the island makes up a name."""


def write_json(path: Path, value: Any) -> None:
    """Replace ``path`` by the value, whole or not at all."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    with open(temporary, "w") as file:
        json.dump(value, file, indent=1)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


class Trace:
    """Writes one island's events and state. Only rank 0 of an island has one that writes (``folder`` given)."""

    def __init__(self, folder: Path | None, island: int, incarnation: str) -> None:
        self.folder = folder
        self.island = island
        self.incarnation = incarnation
        self.step = 0
        self._file = None
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            self._file = open_lines(folder / "events.jsonl")

    def event(self, event: str, **fields: Any) -> None:
        if self._file is None:
            return
        head = {
            "t": time.time(),
            "event": event,
            "island": self.island,
            "incarnation": self.incarnation,
            "step": self.step,
        }
        self._file.write(json.dumps({**head, **fields}) + "\n")

    def state(self, state: str, reason: str = "") -> None:
        """state: "running", "done", "resume" or "fatal"."""
        if self.folder is None:
            return
        if state == "resume":  # the exit code is 0, and TorchTitan says that training has completed
            logger.warning("island %d has not finished and can be resumed: %s", self.island, reason)
        write_json(
            self.folder / "state.json",
            {
                "state": state,
                "reason": reason,
                "step": self.step,
                "island": self.island,
                "incarnation": self.incarnation,
                "pid": os.getpid(),
                "t": time.time(),
            },
        )

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None
