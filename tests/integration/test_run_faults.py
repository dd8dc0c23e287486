"""A run whose islands, and at last its launcher, are killed: the others go on, the killed come back healed."""

import itertools
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import event_schema
from tests.helpers.real_run import LocalRun, local_run, traces_of_ours, write_config

SYNC_EVERY, PACE_S, HEARTBEAT_TIMEOUT_S, JOIN_TIMEOUT_S = 5, 0.2, 3.0, 1.0
SLACK_S = 4.0
"""What the noticing of a death costs beyond the time-outs: threads of eight processes share two cores."""


@dataclass(frozen=True)
class Kill:
    """island: the one that was killed, at `t` (epoch seconds), in its incarnation number `incarnation`."""

    island: int
    t: float
    incarnation: int


@dataclass(frozen=True)
class Battered:
    run: LocalRun
    kills: dict[str, Kill]
    all_killed_at: float
    """When the launcher was killed: what came after the last checkpoint is lost, and its slots are done again."""
    survivors_of_launcher: list[str]
    steps_before: list[int]
    resumed: LocalRun

    def after(self, what: str) -> tuple[Kill, int, list[dict[str, Any]]]:
        """A kill, the other island, and the events of the incarnation that came back."""
        kill = self.kills[what]
        return kill, 1 - kill.island, self.run.incarnations(kill.island)[kill.incarnation + 1]


@pytest.fixture(scope="module")
def battered(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Iterator[Battered]:
    """Island 1's trainer is killed, then island 0's torchrun, then the launcher; the same command goes on."""
    cwd = tmp_path_factory.mktemp("battered")
    config = write_config(cwd, corpus)
    # More steps than it will reach: how long a restart takes must not decide whether the others are done by then.
    arguments = ("--training.steps", "100000", "--debug.pace_step_seconds", str(PACE_S))
    kills = {}
    with local_run(cwd, config, *arguments) as run:
        run.until_step(2 * SYNC_EVERY + 2)
        for name, island in (("trainer", 1), ("torchrun", 0)):
            victims = run.trainers(island) if name == "trainer" else [run.torchrun(island)]
            kills[name] = Kill(island, time.time(), len(run.incarnations(island)) - 1)
            for victim in victims:
                victim.kill()
            run.until(lambda i=island, k=kills[name]: _back(run, i, k.incarnation + 1))
        run.process.kill()
        all_killed_at = time.time()
        run.process.wait()
        deadline = time.monotonic() + 5
        while (left := run.processes()) and time.monotonic() < deadline:
            time.sleep(0.1)
        names = [" ".join(process.cmdline()) for process in left]
        steps = [run.step(island) for island in (0, 1)]
        starts = [len(run.incarnations(island)) for island in (0, 1)]
    with local_run(cwd, config, *arguments) as resumed:
        resumed.until(lambda: all(_back(resumed, i, starts[i]) for i in (0, 1)))
        resumed.signal(signal.SIGINT)
        assert resumed.end() == 75, resumed.output + resumed.errors
        yield Battered(run, kills, all_killed_at, names, steps, resumed)


def _rounds(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [event for event in events if event["event"] == "round" and event["committed"]]


def _back(run: LocalRun, island: int, incarnation: int) -> bool:
    """Whether that incarnation of the island has taken part in two slots, and both islands have said so."""
    starts = run.incarnations(island)
    return len(starts) > incarnation and len(_rounds(starts[incarnation])) >= 3


@pytest.mark.parametrize("what", ["trainer", "torchrun"])
def test_the_other_island_goes_on_without_a_gap_longer_than_the_time_outs(
    battered: Battered, what: str
) -> None:
    kill, other, back = battered.after(what)
    until = _rounds(back)[1]["t"]
    times = [e["t"] for e in battered.run.events(other, "inner") if kill.t - 2 <= e["t"] <= until]
    gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
    assert len(gaps) > 2 * SYNC_EVERY
    assert max(gaps) <= HEARTBEAT_TIMEOUT_S + JOIN_TIMEOUT_S + PACE_S + SLACK_S
    alone = [
        e for e in battered.run.events(other, "round") if e["participants"] == [other] and e["t"] > kill.t
    ]
    assert alone and all(event["committed"] for event in alone)


@pytest.mark.parametrize("what", ["trainer", "torchrun"])
def test_a_killed_island_heals_once_before_its_first_inner_step_and_continues_where_its_peer_is(
    battered: Battered, what: str
) -> None:
    kill, other, back = battered.after(what)
    # Admitted between a slot's last inner step and its outcome, it takes part in the slot first.
    kinds = [event["event"] for event in back if event["event"] not in ("waiting", "round")]
    assert kinds[:4] == ["start", "heal", "join", "inner"]
    assert kinds.count("heal") == 1
    heal, join, first = (next(e for e in back if e["event"] == kind) for kind in ("heal", "join", "inner"))
    assert heal["source"] == other
    assert first["step"] == join["step"] + 1
    reached = max(e["step"] for e in battered.run.events(other, "inner") if e["t"] <= first["t"])
    assert abs(first["step"] - reached) <= SYNC_EVERY
    before = max(
        e["step"] for e in battered.run.incarnations(kill.island)[kill.incarnation] if e["event"] == "inner"
    )
    assert first["step"] > before + 1


def test_digests_agree_in_every_slot_that_both_islands_committed(battered: Battered) -> None:
    again = battered.resumed.common_digests(since=battered.all_killed_at)
    assert len(set(again.values())) == len(again) >= 2
    common = battered.resumed.common_digests(until=battered.all_killed_at)
    assert len(set(common.values())) == len(common) >= 6
    for kill in battered.kills.values():
        back = battered.run.incarnations(kill.island)[kill.incarnation + 1]
        first, *rest = _rounds(back)[:3]
        assert all(event["round"] in common for event in (first, *rest))
        # Admitted when the other was at a slot's last inner step, it has nothing to give to that one yet.
        assert first["participants"] in ([0, 1], [1 - kill.island])
        assert [event["participants"] for event in rest] == [[0, 1], [0, 1]]


def test_the_launcher_says_what_was_killed_and_what_it_starts_again(battered: Battered) -> None:
    assert "island 1 ended with exit code 1; starting it again in 1 s" in battered.run.output
    assert "island 0 ended with signal SIGKILL; starting it again in 1 s" in battered.run.output
    assert "Lighthouse ended" not in battered.run.output


def test_five_seconds_after_the_launcher_is_killed_nothing_of_the_run_is_left(battered: Battered) -> None:
    assert battered.survivors_of_launcher == []


def test_the_same_command_continues_a_run_whose_launcher_was_killed(battered: Battered) -> None:
    assert "continuing the unfinished run" in battered.resumed.output
    for island in (0, 1):
        now = battered.resumed.incarnations(island)[-1]
        first = next(event for event in now if event["event"] == "inner")
        # At most the steps since the last checkpoint are trained again.
        assert (
            battered.steps_before[island] - 10 - SYNC_EVERY
            <= first["step"] - 1
            <= battered.steps_before[1 - island] + SYNC_EVERY
        )
        assert _rounds(now)[0]["participants"] == [0, 1]


def test_events_stay_within_the_contract_whatever_is_killed(battered: Battered) -> None:
    for island in (0, 1):
        assert event_schema.problems(battered.resumed.events(island)) == []
        state = battered.resumed.state(island)
        assert event_schema.state_problems(state) == [] and state["state"] == "resume"


def test_killed_processes_leave_no_abort_or_stack_trace_of_ours(battered: Battered) -> None:
    # torchrun's own, over the death of its child, is there.
    for words in ("FATAL", "core dumped", "terminate called", "of another run", "torchft/"):
        assert [line for line in battered.resumed.logs().splitlines() if words in line] == []
    assert traces_of_ours(battered.resumed.logs()) == []
