"""The hub's decisions, called directly: who founds and joins, what becomes of slots, and what a restart leaves undecided."""

from pathlib import Path

import pytest
import torch

from tests.helpers.hub_words import Clock, Talker, a_hub, a_run, commit, fresh_state, merge, terms_of
from torchtitan_diloco.hub.hub import Hub
from torchtitan_diloco.hub.refusal import Refusal
from torchtitan_diloco.hub.slot import Open
from torchtitan_diloco.hub.store import FileStore
from torchtitan_diloco.hub.upload import Upload
from torchtitan_diloco.outer.merge import Merged
from torchtitan_diloco.outer.optimizer import OuterSGD
from torchtitan_diloco.outer.policy import call_roll
from torchtitan_diloco.outer.state import OuterState


def tokens(hub: Hub) -> int:
    assert hub.state is not None
    return hub.state.tokens_total


def test_a_run_is_founded_by_the_longest_history_once_all_are_there() -> None:
    hub = a_hub()
    commit(hub, a_run(hub), 0)
    assert hub.state is not None
    veteran, fresh, again = Talker(a_hub(), 1), Talker(a_hub(), 0), a_hub()
    veteran.hub = fresh.hub = again
    veteran.state.restore(hub.state.describe(), hub.state.tensors())
    assert "2 islands; islands present: 0" in fresh.join()["why"]
    assert veteran.join()["status"] == "take"
    assert fresh.join()["status"] == "take"
    assert again.state is not None and again.state.describe() == hub.state.describe()


def test_other_settings_are_refused_and_named_but_who_is_alone_may_change_them() -> None:
    hub = a_hub()
    first, second = Talker(hub, 0), Talker(hub, 1)
    first.hello(terms_of(**{"semi_sync.outer.lr": 7.0}))
    with pytest.raises(Refusal, match=r"semi_sync.outer.lr: 0.7 here, 7.0 in the run"):
        second.hello()
    again = Talker(hub, 0, "b", started=2.0)
    first.hub.leave(first.member, "failure")
    assert again.hello()["status"] == "wait"
    assert second.hello()["status"] == "wait"


def test_a_slot_waits_for_everybody_and_commits_what_all_have_sent() -> None:
    hub = a_hub()
    a, b = a_run(hub)
    assert a.say(0) == {"status": "open", "phase": "headers", "islands": [1], "missing": [(0, 20)]}
    a.send(0)
    assert hub.take_job() is None
    b.say(0)
    b.send(0, part=0.5)
    assert hub.take_job() is None
    assert b.outcome(0) == {"status": "open", "phase": "payloads", "islands": [1], "missing": [(10, 20)]}
    b.send(0)
    assert merge(hub)
    assert a.outcome(0)["participants"] == (0, 1) and tokens(hub) == 80


def test_saying_everything_again_changes_nothing() -> None:
    hub = a_hub()
    talkers = a_run(hub)
    commit(hub, talkers, 0)
    assert hub.state is not None
    before = hub.state.describe()
    for talker in talkers:
        assert talker.say(0)["status"] == "committed"
        with pytest.raises(Refusal, match="takes no payload") as refusal:
            talker.send(0)
        assert refusal.value.kind == "gone"
        assert talker.join()["status"] == "take"
        hub.admit(talker.member, 0)
        assert talker.beat() == {"member": True}
        assert hub.withdraw(talker.member, 0)["status"] == "committed"
    assert not merge(hub) and hub.state.describe() == before and not hub.open


def test_an_island_that_is_gone_is_not_waited_for_but_what_it_has_sent_counts() -> None:
    clock = Clock()
    hub = a_hub(clock)
    a, b, c = a_run_of_three(hub)
    for talker in (a, b):
        talker.say(0)
        talker.send(0)
    clock.t += 4.0
    a.beat()
    b.beat()
    clock.t += 2.0
    assert [seat.member for seat in hub.tick()] == [c.member]
    assert merge(hub) and a.outcome(0)["participants"] == (0, 1)


def a_run_of_three(hub: Hub) -> list[Talker]:
    talkers = a_run(hub)
    talkers.append(Talker(hub, 2))
    talkers[2].enter()
    return talkers


def test_after_wait_s_a_slot_goes_on_without_the_silent_who_is_then_behind() -> None:
    clock = Clock()
    hub = a_hub(clock, wait_s=3.0)
    a, b = a_run(hub)
    a.say(0)
    a.send(0)
    clock.t += 3.0
    hub.tick()
    assert merge(hub) and a.outcome(0)["participants"] == (0,)
    assert b.say(0)["status"] == "behind"


@pytest.mark.parametrize("windows", [0.0, 2.0], ids=["as set", "derived"])
def test_fr_07_a_slot_waits_two_windows_of_a_slow_island_but_not_for_one_that_is_gone(windows: float) -> None:
    """An hour is less than two windows of 4 steps of 600 s."""
    clock = Clock()
    hub = a_hub(clock, wait_s=3600.0, windows=windows, lease_s=150.0)
    a, b = a_run(hub)

    def wait(seconds: int, *alive: Talker, step: int = 2) -> None:
        for _ in range(seconds // 50):
            clock.t += 50.0
            for talker in alive:
                talker.beat(step=step)
            hub.tick()

    wait(50, a, b, step=1)
    wait(600, a, b, step=1)
    b.beat(step=2)
    a.say(0)
    a.send(0)
    wait(3600, a, b)
    if not windows:
        assert merge(hub) and a.outcome(0)["participants"] == (0,)
        return
    wait(1100, a, b)
    assert not merge(hub)
    b.say(0)
    b.send(0)
    assert merge(hub) and a.outcome(0)["participants"] == (0, 1)
    a.say(1)
    a.send(1)
    wait(200, a)
    assert merge(hub) and a.outcome(1)["participants"] == (0,)


def test_slots_are_settled_in_their_order() -> None:
    hub = a_hub()
    talkers = a_run(hub)
    for slot in (1, 0):
        for talker in talkers:
            talker.say(slot)
    for talker in talkers:
        talker.send(1)
    assert not merge(hub)
    for talker in talkers:
        talker.send(0)
    assert merge(hub) and merge(hub) and sorted(hub.records) == [0, 1]


@pytest.mark.parametrize(
    "how, reason",
    [
        ({"steps": 0, "tokens": 0}, "no island has made a step"),
        ({"finite": False}, "no delta is finite"),
        ({"tokens": 0}, "no tokens to be weighed by"),
    ],
)
def test_a_slot_with_nothing_to_merge_fails_and_changes_nothing(
    how: dict[str, int | bool], reason: str
) -> None:
    hub = a_hub()
    for talker in a_run(hub):
        reply = talker.say(0, **how)
    assert reply["status"] == "failed" and reason in reply["reason"]
    assert tokens(hub) == 0 and hub.state is not None and hub.state.slot == 1


def test_a_new_start_of_an_island_takes_the_place_of_what_its_predecessor_had_sent() -> None:
    """Of an island's two starts never one's header is merged with the other's payload."""
    old, new = Talker(a_hub(), 0), Talker(a_hub(), 0, "b")
    slot = Open(0, 0, 0.0)
    slot.hear(old.member, old.header(0))
    slot.uploads[old.member] = Upload(0)
    slot.hear(new.member, new.header(0))
    slot.roll = call_roll(slot.by_island())
    assert list(slot.headers) == [new.member] and slot.uploading() == [0]


def test_a_joiner_is_waited_for_from_the_next_slot_on() -> None:
    hub = a_hub()
    a, b = a_run(hub)
    a.say(0)
    c = Talker(hub, 2)
    c.enter()
    assert not hub.shelve(c.member)["settled"]
    b.say(0)
    for talker in (a, b):
        talker.send(0)
    assert merge(hub) and hub.shelve(c.member)["settled"]
    for talker in (a, b, c):
        talker.take()
    a.say(1)
    assert b.say(1)["islands"] == [2]


def test_nobody_is_admitted_who_was_not_offered_the_state() -> None:
    """A late copy of an admission must not make a member of who joins a hub that was started anew."""
    hub = a_hub()
    a = Talker(hub, 0)
    a.join()
    with pytest.raises(Refusal, match="has not been offered the run's state") as refusal:
        hub.admit(a.member, 3)
    assert refusal.value.kind == "stranger"
    with pytest.raises(Refusal, match="has not been admitted"):
        a.say(0)
    assert a.beat() == {"member": False}


def test_a_slot_that_the_run_does_not_have_is_refused() -> None:
    hub = a_hub()
    a, _ = a_run(hub)
    slots = terms_of().clock().slots
    with pytest.raises(Refusal, match=f"has {slots} slots, none of number {slots}"):
        a.say(slots)
    assert not hub.open


def test_a_state_stays_as_it_is_while_a_joiner_reads_it() -> None:
    clock = Clock()
    hub = a_hub(clock)
    talkers = a_run(hub)
    commit(hub, talkers, 0)
    key = hub.shelve(talkers[0].member)["key"]
    before = hub.shelf.tensor(key, "anchor.0").clone()
    for slot in range(1, 6):
        commit(hub, talkers, slot)
        clock.t += 1.0
        assert hub.shelf.tensor(key, "anchor.0").equal(before)


# ---- a restart -----------------------------------------------------------------------------------------------------


def restarted(folder: Path, clock: Clock | None = None) -> Hub:
    return a_hub(clock, store=FileStore(folder, every=100))


def back(hub: Hub, *talkers: Talker) -> None:
    for talker in talkers:
        talker.hub = hub


def a_run_that_lost_its_hub(folder: Path) -> tuple[Hub, Talker, Talker]:
    """Slots 0 to 3 are committed and only the first state is saved; island 1 has not learnt of the last one."""
    hub = a_hub(store=FileStore(folder, every=100))
    a, b = a_run(hub)
    for slot in range(3):
        commit(hub, [a, b], slot)
    held = b.state.copy()
    commit(hub, [a, b], 3)
    b.state = held
    hub.store.close()
    again = restarted(folder)
    assert again.state is not None and again.state.slot == 0
    back(again, a, b)
    return again, a, b


@pytest.mark.parametrize("first", [0, 1])
def test_after_a_restart_the_islands_bring_back_all_that_was_committed(tmp_path: Path, first: int) -> None:
    """Whoever comes first: an island that has applied a version is never sent back behind it."""
    hub, a, b = a_run_that_lost_its_hub(tmp_path)
    lineage = a.state.lineage
    one, other = (a, b) if first == 0 else (b, a)
    replies = [one.join(), other.join()]
    assert replies[1]["status"] == "take"
    assert replies[0]["status"] == ("take" if one is a else "wait")
    a.enter()
    b.enter()
    assert hub.state is not None and hub.state.lineage == lineage == b.state.lineage
    commit(hub, [a, b], 4)
    hub.store.close()


def test_what_nobody_has_taken_is_committed_anew_once_all_have_said_so(tmp_path: Path) -> None:
    hub, a, b = a_run_that_lost_its_hub(tmp_path)
    a.state = b.state.copy()
    assert "islands [1], which may hold later state" in a.join()["why"]
    assert b.join()["status"] == "take"
    a.enter()
    b.enter()
    assert hub.state is not None and hub.state.slot == 3
    commit(hub, [a, b], 3)
    hub.store.close()


def test_after_a_restart_the_first_island_back_does_not_go_on_alone(tmp_path: Path) -> None:
    clock = Clock()
    hub = a_hub(store=FileStore(tmp_path))
    a, b = a_run(hub)
    for slot in range(3):
        commit(hub, [a, b], slot)
    hub.store.close()
    again = restarted(tmp_path, clock)
    back(again, a, b)
    a.enter()
    assert a.say(3)["islands"] == [1]
    clock.t += 4.0
    again.tick()
    a.beat()
    b.enter()
    commit(again, [a, b], 3)
    assert a.outcome(3)["participants"] == (0, 1)
    again.store.close()


def test_after_a_restart_an_island_that_stays_away_is_not_waited_for_for_long(tmp_path: Path) -> None:
    clock = Clock()
    hub = a_hub(store=FileStore(tmp_path))
    a, b = a_run(hub)
    commit(hub, [a, b], 0)
    hub.store.close()
    again = restarted(tmp_path, clock)
    back(again, a)
    a.enter()
    a.say(1)
    a.send(1)
    for _ in range(21):
        clock.t += 1.0
        a.beat()
        again.tick()
    assert merge(again) and a.outcome(1)["participants"] == (0,)
    again.store.close()


def test_islands_that_began_from_other_seeds_do_not_mix_them() -> None:
    """What islands begin with is no history: the first one's is the run's."""
    hub = a_hub()
    a, b = Talker(hub, 0), Talker(hub, 1)
    other = fresh_state()
    for held in other.states:
        held.anchor.add_(1.0)
    b.state = OuterState.found(
        other.fragments, OuterSGD(0.7, 0.9, True), [s.anchor for s in other.states], 2, hand_over=False
    )
    a.join()
    b.join()
    a.join()
    assert b.join()["status"] == "take"
    assert hub.state is not None and not hub.state.states[0].anchor.any()


def test_after_a_restart_a_joiner_starts_at_the_step_of_the_run_though_nobody_is_there_to_say_it(
    tmp_path: Path,
) -> None:
    """An island with an empty folder would else train from step 0 to where the run is, in one window."""
    hub = a_hub(store=FileStore(tmp_path))
    talkers = a_run(hub)
    for slot in range(3):
        commit(hub, talkers, slot)
    hub.store.close()
    again = restarted(tmp_path)
    assert again.step == terms_of().clock().due(2) > 0
    fresh = Talker(again, 1, "b", started=2.0)
    assert fresh.join()["step"] == again.step
    again.store.close()


def test_a_joiner_starts_where_the_others_are_by_now_not_where_they_were_when_they_last_said_so() -> None:
    """They would wait for it at its first slot as long as it is behind them."""
    clock = Clock()
    hub = a_hub(clock)
    a, b = a_run(hub)
    for step, idle_s in (
        (0, 0.0),
        (200, 0.5),
        (202, 0.0),
    ):  # a step takes 0.75 s: 202 were done 1.5 s after the 200
        a.beat(idle_s, step)
        clock.t += 1.0
    hub.leave(b.member, "failure")
    again = Talker(hub, 1, "b", started=2.0)
    again.join()
    clock.t += 1.0
    again.state.slot = 102  # due at step 206
    assert hub.admit(again.member, 102)["step"] == 204
    clock.t += 60.0  # the others have stood still meanwhile
    a.beat(60.0, 202)
    assert hub.admit(again.member, 102)["step"] == 205, "later than any step of its first slot"


# ---- other settings ------------------------------------------------------------------------------------------------


def a_stopped_run(folder: Path, clock: Clock) -> tuple[Hub, list[Talker]]:
    """Slots 0 to 2 are committed; everybody has left, and the hub was started anew."""
    hub = a_hub(store=FileStore(folder))
    talkers = a_run(hub)
    for slot in range(3):
        commit(hub, talkers, slot)
    for talker in talkers:
        hub.leave(talker.member, "done")
    hub.store.close()
    again = restarted(folder, clock)
    back(again, *talkers)
    return again, talkers


def test_a_run_that_has_ended_may_get_more_steps_from_whoever_is_alone(tmp_path: Path) -> None:
    hub, (a, b) = a_stopped_run(tmp_path, Clock())
    digests = [held.digest for held in a.state.states]
    more = {"training.steps": 5000}
    a.enter(**more)
    with pytest.raises(Refusal, match=r"training.steps: 4000 here, 5000 in the run"):
        b.join()
    b.enter(**more)
    assert hub.state is not None and [held.digest for held in hub.state.states] == digests
    commit(hub, [a, b], 3)
    hub.store.close()
    assert (found := FileStore(tmp_path).load()) is not None
    assert found.terms.settings["training.steps"] == 5000


def test_settings_of_a_stopped_run_may_change_once_nobody_may_come_back_to_the_old_ones(
    tmp_path: Path,
) -> None:
    clock = Clock()
    hub, (a, b) = a_stopped_run(tmp_path, clock)
    changed = {"semi_sync.outer.lr": 0.3, "semi_sync.codec.wire": "int8"}
    with pytest.raises(
        Refusal, match=r"semi_sync.outer.lr: 0.3 here.*; only a stopped run .* islands \[0, 1\] are in it"
    ):
        a.join(**changed)
    clock.t += 60.0
    a.enter(**changed)
    b.enter(**changed)
    assert hub.state is not None and hub.state.optimizer.lr == 0.3
    commit(hub, [a, b], 3)
    hub.store.close()


@pytest.mark.parametrize("changed", [{"semi_sync.outer.momentum": 0.0}, {"semi_sync.method": "local_sgd"}])
def test_a_change_that_the_state_does_not_fit_is_refused(tmp_path: Path, changed: dict[str, object]) -> None:
    clock = Clock()
    hub, (a, _) = a_stopped_run(tmp_path, clock)
    clock.t += 60.0
    with pytest.raises(Refusal, match="this cannot be changed in a run"):
        a.join(**changed)
    a.enter()
    hub.store.close()


def test_while_others_are_in_the_run_nobody_changes_it() -> None:
    hub = a_hub()
    a, b = a_run(hub)
    commit(hub, [a, b], 0)
    hub.leave(b.member, "drain")
    again = Talker(hub, 1, "b", started=2.0)
    with pytest.raises(Refusal, match=r"training.steps: 5000 here, 4000 in the run"):
        again.join(**{"training.steps": 5000})


@pytest.mark.parametrize("found, islands, present", [("majority", 3, 2), ("any", 3, 1)])
def test_when_an_island_has_no_patience_left_enough_of_them_found_the_run(
    found: str, islands: int, present: int
) -> None:
    hub = a_hub()
    terms = terms_of(islands, **{"semi_sync.found": found})
    talkers = [Talker(hub, island) for island in range(present)]
    for talker in talkers:
        assert f"{islands} islands; islands present: " in talker.hello(terms)["why"]
    assert talkers[-1].hello(terms, overdue=True)["status"] in ("wait", "upload")
    assert talkers[0].join(**{"semi_sync.num_islands": islands, "semi_sync.found": found})["status"] == "take"
    for talker in talkers:
        talker.enter(**{"semi_sync.num_islands": islands, "semi_sync.found": found})
    assert sorted(hub.seats.members) == list(range(present))


def test_a_minority_does_not_found_the_run_however_long_it_waits() -> None:
    hub = a_hub()
    terms = terms_of(3, **{"semi_sync.found": "majority"})
    reply = Talker(hub, 0).hello(terms, overdue=True)
    assert reply == {"status": "wait", "why": "3 islands; islands present: 0", "founders": 1}


def went_on(state: OuterState, slots: int, tokens: int, island: int) -> OuterState:
    """A copy that has committed so many slots more, with one island."""
    state = state.copy()
    for slot in range(state.slot, state.slot + slots):
        fragment = slot % len(state.states)
        change = Merged.of(torch.full((state.fragments[fragment].numel,), 0.1))
        advance = state.outer_step(fragment, slot)(change)
        state.commit(slot, fragment, advance, [island], tokens, {}, {island: {}})
    return state


def test_a_newcomer_whose_history_has_more_tokens_than_the_running_one_brings_it_and_the_others_take_it() -> (
    None
):
    """The hub's disk was set back, and island 0 has begun again from there; island 1 was away with what was lost."""
    hub = a_hub()
    a, b = a_run(hub)
    commit(hub, [a, b], 0)
    hub.leave(b.member, "drain")
    longer = went_on(b.state, 4, 1000, 1)
    commit(hub, [a], 1)
    b = Talker(hub, 1, "again", started=2.0)
    b.state = longer
    a.say(2)
    assert b.join()["status"] == "take"
    b.take()
    hub.admit(b.member, b.state.slot)
    assert hub.state is not None and hub.state.describe()["fragments"] == longer.describe()["fragments"]
    assert a.outcome(2)["status"] == "behind"
    a.take()
    commit(hub, [a, b], hub.state.slot)


def test_a_newcomer_whose_parted_history_has_fewer_tokens_takes_the_hubs() -> None:
    hub = a_hub()
    a, b = a_run(hub)
    commit(hub, [a, b], 0)
    hub.leave(b.member, "drain")
    shorter = went_on(b.state, 1, 1, 1)
    commit(hub, [a], 1)
    b = Talker(hub, 1, "again", started=2.0)
    b.state = shorter
    b.enter()
    assert b.state.describe() == a.state.describe()


def test_a_hub_takes_a_longer_history_only_once_the_merge_that_is_under_way_has_ended() -> None:
    hub = a_hub()
    a, b = a_run(hub)
    hub.leave(b.member, "drain")
    a.say(0)
    a.send(0)
    job = hub.take_job()
    assert job is not None
    b = Talker(hub, 1, "again", started=2.0)
    b.state = went_on(b.state, 3, 1000, 1)
    assert "the end of a merge" in b.join()["why"]
    job.run()
    hub.done(job)
    assert b.join()["status"] == "take"
