"""Following a trace and adding up its figures."""

import json
from pathlib import Path
from typing import Any

import pytest

from torchtitan_diloco.observe.reading import (
    EventTail,
    IslandFigures,
    anchor_agreement,
    anchors,
    read_island,
    read_state,
)


def inner(step: int, t: float, loss: float = 1.0, incarnation: str = "a", **more: Any) -> dict[str, Any]:
    fields = {"tokens": 100, "seconds": 0.5} | more
    return {"event": "inner", "t": t, "step": step, "incarnation": incarnation, "loss": loss} | fields


def slot(number: int, digest: str = "aa", committed: bool = True, stall_s: float = 0.0) -> dict[str, Any]:
    return {
        "event": "round",
        "t": 0.0,
        "step": 0,
        "incarnation": "a",
        "round": number,
        "committed": committed,
        "digest": digest,
        "stall_s": stall_s,
    }


def test_a_tail_yields_each_line_once_and_waits_for_the_end_of_a_line(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    tail = EventTail(path)
    assert list(tail.read()) == []
    path.write_text('{"event": "start"}\n{"event": "jo')
    assert [e["event"] for e in tail.read()] == ["start"]
    assert list(tail.read()) == []
    with path.open("a") as file:
        file.write('in"}\n')
    assert [e["event"] for e in tail.read()] == ["join"]
    assert tail.torn == 0


def test_a_line_torn_by_a_crash_is_counted_and_costs_no_other_line(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text('{"event": "start"}\n{"event": "inn{"event": "start"}\n[1]\n{"event": "end"}\n')
    tail = EventTail(path)
    assert [e["event"] for e in tail.read()] == ["start", "end"]
    assert tail.torn == 2


def test_tokens_cover_the_steps_between_two_events_and_repeated_steps_count_once() -> None:
    figures = IslandFigures()
    figures.add([inner(1, 0.0, loss=5.0), inner(10, 9.0), inner(20, 19.0)])
    assert (figures.step, figures.tokens) == (20, 2000)
    figures.add([inner(11, 100.0, incarnation="b"), inner(30, 119.0, loss=2.0, incarnation="b")])
    assert (figures.step, figures.tokens, figures.first_loss, figures.last_loss) == (30, 3000, 5.0, 2.0)
    assert figures.tokens_per_second == 200.0
    figures.add([{"event": "end", "t": 0, "step": 30, "tokens": 3001}])
    assert figures.tokens == 3001, "the island's own count wins"


def test_steps_between_the_last_report_and_a_drain_count() -> None:
    figures = IslandFigures()
    figures.add([inner(10, 0.0), {"event": "drain", "t": 1.0, "step": 13, "incarnation": "a"}])
    assert (figures.step, figures.tokens) == (13, 1300)


def test_steps_adopted_from_a_peer_bring_no_tokens() -> None:
    figures = IslandFigures()
    figures.add(
        [inner(10, 0.0), {"event": "heal", "t": 1.0, "step": 100, "incarnation": "b"}, inner(110, 2.0)]
    )
    assert (figures.step, figures.tokens) == (110, 2000)


def test_stall_share_is_over_the_wall_time_of_each_incarnation_and_not_over_the_gap_between_them() -> None:
    figures = IslandFigures()
    assert figures.stall_share is None
    figures.add([inner(1, 0.0), slot(1, stall_s=1.0), inner(10, 10.0)])
    figures.add(
        [inner(10, 5000.0, incarnation="b"), slot(2, stall_s=2.0), inner(20, 5010.0, incarnation="b")]
    )
    assert figures.stall_share == pytest.approx(3.0 / 20.0)


def test_a_stall_before_the_time_that_is_counted_is_no_share_of_it() -> None:
    figures = IslandFigures()
    figures.add([slot(0, stall_s=30.0), inner(10, 0.0), slot(1, stall_s=1.0), inner(20, 10.0)])
    assert figures.stall_share == pytest.approx(0.1)


def test_progress_is_a_step_or_a_committed_slot_not_reached_before() -> None:
    figures = IslandFigures()
    assert figures.add([inner(5, 0.0)])
    assert not figures.add(
        [inner(5, 1.0), inner(4, 2.0), slot(1, committed=False), {"event": "error", "t": 0, "step": 0}]
    )
    assert figures.add([slot(1)])
    assert not figures.add([slot(1)])
    assert (figures.committed, figures.failed, figures.slot) == (1, 1, 1)


def test_waiting_is_shown_until_the_island_works_again() -> None:
    figures = IslandFigures()
    figures.add(
        [{"event": "waiting", "t": 0, "step": 0, "for": [1, 2], "since": 0, "why": "founding; so far 1 MB"}]
    )
    assert figures.waiting == "islands 1, 2 (founding)"
    figures.add([inner(1, 0.0)])
    assert figures.waiting == ""


def test_anchors_are_compared_at_the_last_slot_that_all_islands_committed() -> None:
    figures = {i: IslandFigures() for i in range(3)}
    figures[0].add([slot(1, "aa"), slot(2, "bb"), slot(3, "cc")])
    figures[1].add([slot(1, "aa"), slot(2, "bb")])
    agreement = anchor_agreement(figures)
    assert (agreement.slot, agreement.equal) == (2, True), "island 2 committed nothing and has no say"
    figures[1].add([slot(3, "dd")])
    agreement = anchor_agreement(figures)
    assert (agreement.slot, agreement.equal, dict(agreement.digests)) == (3, False, {0: "cc", 1: "dd"})


def heal(source: int, step: int, incarnation: str = "b") -> dict[str, Any]:
    more = {"source": source, "bytes": 1, "seconds": 0.1, "version": 3}
    return {"event": "heal", "t": 50.0, "step": step, "incarnation": incarnation} | more


def end(step: int, tokens: int = 900) -> dict[str, Any]:
    return {"event": "end", "t": 60.0, "step": step, "incarnation": "b", "tokens": tokens}


def read(folder: Path, *events: dict[str, Any]) -> IslandFigures:
    folder.mkdir()
    (folder / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    return read_island(folder)


def test_an_island_that_ended_with_the_state_of_another_shows_its_last_step_and_that_anchor(
    tmp_path: Path,
) -> None:
    rest = [inner(40, 40.0), slot(3, "cc"), end(40)]
    figures = {
        0: read(tmp_path / "island-0", inner(30, 30.0), slot(1, "aa"), slot(2, "bb"), *rest),
        1: read(tmp_path / "island-1", inner(30, 30.0), slot(1, "aa"), slot(2, "bb"), heal(0, 40), end(40)),
        2: read(tmp_path / "island-2", inner(20, 20.0), slot(1, "aa"), heal(1, 40), end(40)),
    }
    assert [(f.step, f.current_step) for f in figures.values()] == [(40, 40)] * 3
    agreement = anchor_agreement(figures)
    assert (agreement.slot, dict(agreement.digests)) == (3, {0: "cc", 1: "cc", 2: "cc"})
    assert anchors(figures)[2] == {1: "aa", 3: "cc"}
    assert figures[1].committed == 2 and figures[1].tokens == 900, "what it did itself is counted as before"


def test_after_a_heal_an_islands_own_slots_count_again(tmp_path: Path) -> None:
    figures = {
        0: read(tmp_path / "island-0", slot(1, "aa"), slot(2, "bb"), slot(3, "cc"), end(40)),
        1: read(tmp_path / "island-1", slot(1, "aa"), heal(0, 30), slot(3, "dd"), end(40)),
    }
    agreement = anchor_agreement(figures)
    assert (agreement.slot, agreement.equal, dict(agreement.digests)) == (3, False, {0: "cc", 1: "dd"})


def test_an_island_that_has_not_ended_has_only_the_anchors_of_its_own_slots(tmp_path: Path) -> None:
    figures = {
        0: read(tmp_path / "island-0", slot(1, "aa"), slot(2, "bb"), heal(1, 30)),
        1: read(tmp_path / "island-1", slot(1, "aa"), heal(0, 30)),
    }
    assert anchor_agreement(figures).slot == 1
    assert figures[1].current_step == 30 and figures[1].step == 0, (
        "steps of another are no progress of its own"
    )
    for f in figures.values():
        f.ended = True
    assert anchor_agreement(figures).slot == 2


def test_islands_without_digests_have_no_agreement_and_no_quarrel() -> None:
    figures = {i: IslandFigures() for i in range(2)}
    for island in figures.values():
        island.add([slot(1, digest="")])
    assert anchor_agreement(figures).slot is None and anchor_agreement(figures).equal


def test_a_state_that_is_missing_or_no_state_reads_as_none(tmp_path: Path) -> None:
    assert read_state(tmp_path) is None
    for text in ("", "{", "[]", '{"state": 1}'):
        (tmp_path / "state.json").write_text(text)
        assert read_state(tmp_path) is None
    (tmp_path / "state.json").write_text(
        json.dumps({"state": "resume", "reason": "walltime", "step": 7, "t": 5})
    )
    state = read_state(tmp_path)
    assert state and (state.state, state.reason, state.step, state.t) == ("resume", "walltime", 7, 5.0)
