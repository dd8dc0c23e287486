"""Many seeds on two processes: whatever goes wrong, in whichever way, the seed is in the error."""

import multiprocessing
import signal
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from typing import Any

One = Callable[[int], Counter[str] | None]
"""Does a seed; may count what it saw."""


def run_seeds(
    one: One, seeds: range, replay: str, *, seconds: float = 60.0, workers: int = 2
) -> Counter[str]:
    """Call ``one`` (of a module's top level, or a partial of such) for every seed; returns the sum of what it counted.

    replay: how to do one again, with {seed} in place of the seed. seconds: for each. Raises AssertionError with the seed when
    one raises anything, ends its process or takes longer.
    """
    context = multiprocessing.get_context("spawn")
    under_way = context.Array("q", [seeds.start] * workers, lock=False)
    ends: list[Connection] = []
    processes: list[SpawnProcess] = []
    try:
        for worker in range(min(workers, len(seeds))):
            mine, its = context.Pipe(duplex=False)
            arguments = (one, seeds[worker::workers], seconds, under_way, worker, its)
            processes.append(context.Process(target=work, args=arguments, daemon=True))
            processes[-1].start()
            its.close()
            ends.append(mine)
        return collect(ends, under_way, replay)
    except BaseException as error:
        if isinstance(error, SeedFailed):
            raise
        # A time-out of the test, an interrupt: it may be any of these.
        names = ", ".join(replay.format(seed=seed) for seed in under_way)
        raise AssertionError(f"{type(error).__name__} during {names}: {error}") from error
    finally:
        for process in processes:
            process.kill()
            process.join()


class SeedFailed(AssertionError):
    """One seed is to blame."""


def collect(ends: list[Connection], under_way: Sequence[int], replay: str) -> Counter[str]:
    total: Counter[str] = Counter()
    open_ends: list[Any] = list(ends)
    while open_ends:
        for end in wait(open_ends):
            assert isinstance(end, Connection)
            worker = ends.index(end)
            try:
                counted, failure = end.recv()
            except EOFError:
                counted, failure = Counter(), "the process has died"
            if failure is not None:
                raise SeedFailed(f"{replay.format(seed=under_way[worker])}: {failure}")
            total += counted
            open_ends.remove(end)
    return total


def work(
    one: One, seeds: Sequence[int], seconds: float, under_way: Any, worker: int, answer: Connection
) -> None:
    def late(*_: object) -> None:
        raise TimeoutError(f"not done after {seconds:g} s")

    signal.signal(signal.SIGALRM, late)
    parent = multiprocessing.parent_process()
    assert parent is not None
    total: Counter[str] = Counter()
    for seed in seeds:
        if not parent.is_alive():
            return  # killed, so that it could not end this process
        under_way[worker] = seed
        signal.setitimer(signal.ITIMER_REAL, seconds)
        try:
            total += one(seed) or Counter()
        except BaseException as error:  # noqa: BLE001 - even SystemExit is a failure here
            text = "".join(traceback.format_exception(error))
            answer.send((total, f"{type(error).__name__}: {error}\n\n{text}"))
            return
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    answer.send((total, None))
