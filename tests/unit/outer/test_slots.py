"""The slot sequence, and the way from an island's own steps to the run's progress and back."""

from hypothesis import given
from hypothesis import strategies as st

from torchtitan_diloco.outer.slots import SlotClock, own_steps


@st.composite
def clocks(draw: st.DrawFn) -> SlotClock:
    run, own = draw(st.integers(1, 40)), draw(st.integers(1, 40))
    fragments = draw(st.integers(1, min(run, own)))
    return SlotClock(run, draw(st.integers(1, 200)), fragments, own)


def plain(clock: SlotClock) -> SlotClock:
    """Of an island that makes as many steps as the run."""
    return SlotClock(clock.sync_every, clock.steps, clock.fragments)


@given(clocks())
def test_every_island_has_the_slots_of_the_run_in_order_and_ends_with_them(clock: SlotClock) -> None:
    run = plain(clock)
    assert clock.slots == run.slots
    due = [clock.due(slot) for slot in range(clock.slots)]
    assert due == sorted(due)
    for slot in range(clock.slots - clock.fragments):
        assert due[slot] == min(clock.last_step, -(-(slot + 1) * clock.own // clock.fragments))
    assert due[-clock.fragments :] == [clock.last_step] * clock.fragments
    for step in range(clock.last_step + 3):
        assert clock.reached(step) == sum(at <= step for at in due)


@given(clocks())
def test_own_steps_and_progress_meet_at_every_slot(clock: SlotClock) -> None:
    run = plain(clock)
    for slot in range(clock.slots):
        assert clock.progress(clock.due(slot)) == run.due(slot) or clock.due(slot) == clock.last_step
        assert clock.own_step(run.due(slot)) == clock.due(slot)
    assert (clock.progress(0), clock.own_step(0)) == (0, 0)
    assert clock.progress(clock.last_step) == clock.steps
    assert clock.own_step(clock.steps) == clock.last_step


@given(clocks())
def test_neither_translation_goes_back_or_passes_a_slot(clock: SlotClock) -> None:
    run = plain(clock)
    there = [clock.progress(step) for step in range(clock.last_step + 1)]
    assert there == sorted(there)
    assert all(run.reached(p) == clock.reached(step) for step, p in enumerate(there))
    back = [clock.own_step(progress) for progress in range(clock.steps + 1)]
    assert back == sorted(back)
    # Where the end of the run comes before another own step, the last of the regular slots is due at the end as well.
    assert all(
        clock.reached(step) == run.reached(p) or step == clock.last_step for p, step in enumerate(back)
    )


@given(clocks())
def test_a_joiner_with_another_pace_lands_in_the_window_of_its_source(clock: SlotClock) -> None:
    other = SlotClock(clock.sync_every, clock.steps, clock.fragments, 3 * clock.own)
    for step in range(clock.last_step):
        assert other.reached(other.own_step(clock.progress(step))) == clock.reached(step)


@given(clocks())
def test_with_the_pace_of_the_run_nothing_changes(clock: SlotClock) -> None:
    same = SlotClock(clock.sync_every, clock.steps, clock.fragments, clock.sync_every)
    assert same.last_step == clock.steps == own_steps(clock.steps, clock.sync_every, None)
    for step in range(clock.steps + 1):
        assert same.progress(step) == same.own_step(step) == step
    # As TorchFT's streaming DiLoCo spaces them, and one more for each fragment at the end.
    assert [same.due(slot) for slot in range(same.slots)] == [
        min(same.steps, -(-(slot + 1) * same.sync_every // same.fragments)) for slot in range(same.slots)
    ]


def test_a_faster_island_makes_twice_the_steps() -> None:
    slow, fast = SlotClock(5, 34, own=5), SlotClock(5, 34, own=10)
    assert [fast.due(slot) for slot in range(fast.slots)] == [10, 20, 30, 40, 50, 60, 68]
    assert [slow.due(slot) for slot in range(slow.slots)] == [5, 10, 15, 20, 25, 30, 34]
    assert [fast.progress(step) for step in range(10, 15)] == [5, 5, 6, 6, 7]
    assert [fast.own_step(progress) for progress in range(5, 8)] == [10, 12, 14]
