"""The token bucket on a clock of its own."""

from torchtitan_diloco.exchange.pace import TokenBucket


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def test_a_long_transfer_takes_its_bytes_over_the_rate() -> None:
    clock = Clock()
    bucket = TokenBucket(1000.0, burst_s=0.1, clock=clock, sleep=clock.sleep)
    for _ in range(100):
        bucket.take(50)
    assert 4.8 <= clock.now <= 5.0  # 5,000 bytes at 1,000 a second, less the burst


def test_idle_time_is_saved_up_to_one_burst_only() -> None:
    clock = Clock()
    bucket = TokenBucket(1000.0, burst_s=0.1, clock=clock, sleep=clock.sleep)
    clock.now = 100.0
    bucket.take(100)
    assert clock.now == 100.0
    bucket.take(100)
    bucket.take(100)
    assert clock.now == 100.1


def test_no_rate_means_no_wait() -> None:
    clock = Clock()
    TokenBucket(0.0, clock=clock, sleep=clock.sleep).take(10**12)
    assert clock.now == 0.0
