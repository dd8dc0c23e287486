"""A line that a full disk or a kill has cut off costs no other: whoever appends to the file next ends it first."""

import json
from pathlib import Path

import pytest

from torchtitan_diloco.data.ledger import LEDGER, Ledger, read_ledger
from torchtitan_diloco.durable import open_lines
from torchtitan_diloco.observe.events import Trace
from torchtitan_diloco.observe.reading import EventTail

TORN = '{"t": 1796098886.86537'


def test_the_next_start_s_first_event_is_not_lost_with_a_torn_one(tmp_path: Path) -> None:
    (tmp_path / "events.jsonl").write_text(TORN)
    trace = Trace(tmp_path, 0, "b")
    trace.event("start")
    trace.close()
    first, second = (tmp_path / "events.jsonl").read_text().splitlines()
    assert first == TORN and json.loads(second)["event"] == "start"
    tail = EventTail(tmp_path / "events.jsonl")
    assert [event["event"] for event in tail.read()] == ["start"] and tail.torn == 1


def test_nor_is_the_next_entry_of_a_ledger(tmp_path: Path) -> None:
    (tmp_path / LEDGER).write_text(TORN)
    ledger = Ledger(tmp_path, 0)
    ledger.head("lineage", 1, 2, {})
    ledger.close()
    entries, broken = read_ledger(tmp_path / LEDGER)
    assert [entry["kind"] for entry in entries] == ["head"] and broken == 1


@pytest.mark.parametrize("before, after", [("", "b\n"), ("a\n", "a\nb\n"), ("a", "a\nb\n"), ("é", "é\nb\n")])
def test_only_a_torn_line_is_ended(tmp_path: Path, before: str, after: str) -> None:
    path = tmp_path / "lines"
    path.write_bytes(before.encode())
    with open_lines(path) as file:
        file.write("b\n")
    assert path.read_bytes() == after.encode()
