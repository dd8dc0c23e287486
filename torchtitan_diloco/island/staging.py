"""Host memory that a rank's accelerator copies to and from: page-locked, so at the link's speed and beside training."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


class Staging:
    """One buffer for whatever moves next, used again and again: fresh memory is several times slower than a copy.

    On a CPU it is ordinary memory, and nothing waits for anything. staged: False where tensors can as well be copied
    straight to where they are wanted.
    """

    def __init__(self, device: torch.device, staged: bool | None = None) -> None:
        """staged: True puts the CPU through the motions of an accelerator."""
        self._device = torch.get_device_module(device.type)
        self._pinned = device.type != "cpu"
        self.staged = self._pinned if staged is None else staged
        self._stream = self._device.Stream() if self.staged else None
        self._buffer = torch.empty(0, dtype=torch.float32)

    def buffer(self, length: int) -> torch.Tensor:
        """float32, 1-D, with whatever values; valid until next time."""
        if self._buffer.numel() < length:
            self._buffer = torch.empty(length, dtype=torch.float32, pin_memory=self._pinned)
        return self._buffer[:length]

    @contextmanager
    def fetching(self) -> Iterator[None]:
        """Copies to the host, begun inside, are complete on leaving.

        They run beside the training stream, after what it has been given so far; what it is given later waits for them, or
        the next optimizer step could overtake them. The host waits for nothing else.
        """
        if self._stream is None:
            yield
            return
        training = self._device.current_stream()
        self._stream.wait_stream(training)
        with self._device.stream(self._stream):
            yield
        copied = self._device.Event()
        copied.record(self._stream)
        training.wait_event(copied)
        copied.synchronize()

    @contextmanager
    def pushing(self) -> Iterator[None]:
        """Copies to the device, begun inside, are complete on leaving, so that the buffer may be used again.

        They take their turn on the training stream: the next inner step needs them.
        """
        yield
        if self.staged:
            copied = self._device.Event()
            copied.record(self._device.current_stream())
            copied.synchronize()
