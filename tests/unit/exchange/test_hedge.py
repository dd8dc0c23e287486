"""Questions that are said again over another connection: the first answer counts, whichever line brings it."""

import threading

import pytest

from torchtitan_diloco.exchange.chunks import Unreachable
from torchtitan_diloco.exchange.hedge import Hedge
from torchtitan_diloco.hub.refusal import Refusal

LONG = 30.0


class Wire:
    """Three lines. stuck: those that answer only when they are let go. asked: which were asked, in order."""

    def __init__(self, stuck: str = "", broken: str = "") -> None:
        self.stuck, self.broken = stuck, broken
        self.asked: list[str] = []
        self.let_go = threading.Event()

    def __call__(self, line: str) -> str:
        self.asked.append(line)
        if line in self.stuck:
            assert self.let_go.wait(LONG)
        if line in self.broken:
            raise Unreachable(line)
        return line


def test_while_lines_answer_each_question_is_asked_once_and_the_lines_take_turns():
    wire, hedge = Wire(), Hedge("abc", LONG)
    assert [hedge.ask(wire) for _ in range(4)] == wire.asked == ["a", "b", "c", "a"]


def test_the_first_answer_counts_and_a_line_that_is_stuck_is_passed_over_until_it_is_free():
    wire, hedge = Wire(stuck="ab"), Hedge("abc", 0.01)
    assert hedge.ask(wire) == "c" and wire.asked == ["a", "b", "c"]
    assert [hedge.ask(wire) for _ in range(2)] == ["c", "c"]
    wire.let_go.set()
    assert {hedge.ask(wire) for _ in range(50)} == {"a", "b", "c"}


def test_no_answer_from_one_line_is_not_the_end_while_another_is_asked():
    wire, hedge = Wire(stuck="a", broken="b"), Hedge("abc", 0.01)
    assert hedge.ask(wire) == "c"
    wire.let_go.set()


def test_when_all_that_were_asked_have_no_answer_that_is_said():
    wire, hedge = Wire(broken="abc"), Hedge("abc", LONG)
    with pytest.raises(Unreachable, match=r"^a$"):
        hedge.ask(wire)
    assert wire.asked == ["a"]
    stuck, hedge = Wire(stuck="abc", broken="abc"), Hedge("abc", 0.01)
    threading.Timer(0.2, stuck.let_go.set).start()
    with pytest.raises(Unreachable):
        hedge.ask(stuck)
    assert stuck.asked[:3] == [
        "a",
        "b",
        "c",
    ]  # and perhaps one that was free again before the last had answered


def test_a_refusal_is_an_answer():
    def refuse(line: str) -> None:
        raise Refusal("stranger", line)

    with pytest.raises(Refusal, match=r"^a$"):
        Hedge("abc", LONG).ask(refuse)
