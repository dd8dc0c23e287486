"""What all threads of a process are doing, written down where a file asks for it: not everywhere may debuggers attach."""

import logging
import os
import sys
import threading
import time
import traceback
from pathlib import Path

logger = logging.getLogger(__name__)

REQUEST = "dump"
"""File in the island's folder; each time it is touched, every rank of the island writes its stacks."""
LOOK_S = 2.0


def stacks() -> str:
    """The Python stack of every thread, the innermost call last.

    Without the lines of source, which may lie on the very file system that everything waits for.
    """
    threads = {thread.ident: thread for thread in threading.enumerate()}
    said = []
    for ident, frame in sys._current_frames().items():
        said.append(f"thread {threads[ident].name if ident in threads else ident}:")
        calls = reversed([*traceback.walk_stack(frame)])
        said += [f"  {f.f_code.co_filename}:{line} {f.f_code.co_qualname}" for f, line in calls]
    return "\n".join(said) + "\n"


class StackWriter:
    """Looks for the request in ``folder``, and appends to ``logs/stacks-rank-<rank>.txt`` there.

    The request is not removed, since every rank has to see it. One from before this start is no request.
    """

    def __init__(self, folder: Path, rank: int, look_s: float = LOOK_S) -> None:
        self._request = folder / REQUEST
        self._file = folder / "logs" / f"stacks-rank-{rank}.txt"
        self._look_s = look_s
        self._seen = self._touched()

    def start(self) -> None:
        threading.Thread(target=self._watch, daemon=True, name="stacks").start()

    def _watch(self) -> None:
        while True:
            time.sleep(self._look_s)
            try:
                self.look()
            except OSError as error:  # a full disk, which must not end the looking
                logger.warning("the stacks could not be written: %s", error)

    def look(self) -> bool:
        """Write the stacks if they have been asked for since the last look."""
        touched = self._touched()
        if touched == self._seen:
            return False
        self._seen = touched
        if touched is None:  # it was removed
            return False
        self._file.parent.mkdir(parents=True, exist_ok=True)
        with open(self._file, "a") as file:
            file.write(f"==== {time.strftime('%Y-%m-%d %H:%M:%S')}, process {os.getpid()}\n{stacks()}")
        return True

    def _touched(self) -> int | None:
        try:
            return self._request.stat().st_mtime_ns
        except OSError:
            return None
