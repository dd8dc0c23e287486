"""FR-66: how far a transfer has come, in words."""

from torchtitan_diloco.exchange.traffic import Traffic

MB = 1_000_000


def test_fr_66_the_latest_transfer_of_a_slot_is_told_with_its_rate_and_with_how_long_nothing_has_come() -> (
    None
):
    now = [100.0]
    traffic = Traffic(clock=lambda: now[0])
    traffic.open(3)
    assert traffic.progress(3) == traffic.progress(4) == traffic.progress(None) == ""
    traffic.expect(3, 8 * MB)
    assert traffic.progress(3) == "0.0 of 8.0 MB"
    now[0] += 2.0
    traffic.add(3, sent=2 * MB, received=MB)
    now[0] += 1.0
    assert traffic.progress(3) == "3.0 of 8.0 MB at 1.50 MB/s"
    now[0] += 9.0
    assert traffic.progress(3) == "3.0 of 8.0 MB at 1.50 MB/s, nothing for 10 s"
    traffic.expect(3, 4 * MB)  # another attempt
    now[0] += 1.0
    traffic.add(3, received=4 * MB)
    now[0] += 60.0
    assert traffic.progress(3) == "4.0 of 4.0 MB at 4.00 MB/s"
    assert traffic.close(3) == (2 * MB, 5 * MB)
    assert traffic.progress(3) == ""
    traffic.expect(3, MB)  # of an attempt that was given up
    assert traffic.progress(3) == ""
