"""Bulk over HTTP: chunk by chunk over several connections, each a short request that may be made again."""

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import CancelledError, ThreadPoolExecutor, wait

import httpx
import xxhash

from torchtitan_diloco.hub.dial import CHECKSUM
from torchtitan_diloco.hub.upload import Upload

CHUNK = 4 << 20  # bytes of bulk in one request
SMALLEST_CHUNK = 256 << 10


class Unreachable(Exception):
    """The other side, or something on the way to it, did not answer as it should; to be tried again."""


Request = Callable[[int, int], httpx.Response]
"""For the bytes from an offset on, so many of them. Raises Unreachable."""


class Chunks:
    """The connections, and how much goes over one of them at a time."""

    def __init__(self, streams: int, name: str) -> None:
        self._pool = ThreadPoolExecutor(streams, thread_name_prefix=name)
        self.size = CHUNK

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def fetch(self, what: str, into: Upload, request: Request, moved: Callable[[int], None]) -> None:
        """Fetch what is missing of it; what has come stays, whatever happens. Raises what ``request`` does.

        moved: is told how many bytes have come.
        """
        lock = threading.Lock()

        def fetch(start: int, stop: int) -> None:
            size = stop - start
            response = request(start, size)
            chunk = response.content
            if len(chunk) != size or xxhash.xxh3_64_hexdigest(chunk) != response.headers.get(CHECKSUM):
                raise Unreachable(f"{len(chunk)} bytes of {what} have come damaged")
            with lock:
                into.write(start, chunk)
            moved(size)

        self.each(fetch, into.missing())

    def each(self, act: Callable[[int, int], None], ranges: Iterable[tuple[int, int]]) -> None:
        """All of the ranges. What was cut is tried again in smaller chunks, as long as some of it arrives."""
        left = list(ranges)
        while left:
            chunks = [
                (at, min(at + self.size, stop))
                for start, stop in left
                for at in range(start, stop, self.size)
            ]
            futures = [self._pool.submit(act, start, stop) for start, stop in chunks]
            left, cut = [], None
            try:
                for chunk, future in zip(chunks, futures, strict=True):
                    try:
                        future.result()
                    except CancelledError:
                        left.append(chunk)
                    except Unreachable as error:
                        left.append(chunk)
                        cut = error
                        for other in futures:  # nobody waits for the time-out of every one of them
                            other.cancel()
            finally:
                for future in futures:
                    future.cancel()
                wait(futures)  # so that none of them writes into what the next attempt reads
            if cut is not None:
                self.size = max(SMALLEST_CHUNK, self.size // 2)
                if len(left) == len(chunks):
                    raise cut
