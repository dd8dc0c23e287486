"""A Lighthouse for the tests whose gateways run in this process."""

from collections.abc import Iterator

import pytest
from torchft.coordination import LighthouseServer

from torchtitan_diloco.config.own import LighthouseConfig


def serve(timeout_s: float, join_timeout_s: float) -> Iterator[LighthouseConfig]:
    """timeout_s: silence after which an island counts as gone. join_timeout_s: see ``LighthouseConfig``."""
    server = LighthouseServer(
        bind="127.0.0.1:0", min_replicas=1, join_timeout_ms=int(1000 * join_timeout_s), quorum_tick_ms=20,
        heartbeat_timeout_ms=int(1000 * timeout_s),
    )  # fmt: skip
    port = server.address().rsplit(":", 1)[1]
    yield LighthouseConfig(
        address=f"http://127.0.0.1:{port}", heartbeat_interval_s=0.2, heartbeat_timeout_s=timeout_s, quorum_interval_s=0.05,
        patience_s=30.0,
    )  # fmt: skip
    server.shutdown()


@pytest.fixture
def lighthouse() -> Iterator[LighthouseConfig]:
    yield from serve(1.0, 0.3)


@pytest.fixture
def patient_lighthouse() -> Iterator[LighthouseConfig]:
    """For counts of bytes: a machine that is busy for a second makes no exchange start anew."""
    yield from serve(8.0, 8.0)
