"""Who has the run's state when islands in lock step meet, who must take it, who does not fit; and their account."""

import itertools
import json
from dataclasses import replace

import pytest

from torchtitan_diloco.outer.account import Account
from torchtitan_diloco.outer.meeting import Record, meet


def record(island: int, step: int = 0, **changes) -> Record:
    account = Account(step=step, origin="weights", lineage=changes.pop("lineage", f"after {step}"))
    values = {
        "incarnation": f"{island}-first", "started": 0.0, "run_id": "run", "member": False, "settings": {"lr": 1},
        "holds": {"source": "0-3"}, "moments": step > 0, "account": account,
    }  # fmt: skip
    return Record(**{"island": island, **values, **changes})


def test_fresh_islands_found_a_run_once_all_are_there_and_nobody_is_behind():
    assert not meet([record(0)], 2).complete
    verdict = meet([record(1), record(0)], 2)
    assert verdict.complete and (verdict.source, verdict.behind, dict(verdict.refused)) == (1, (), {})


def test_of_founders_the_furthest_has_the_runs_state():
    verdict = meet([record(0, 50), record(1, 100), record(2, 50)], 3)
    assert (verdict.source, verdict.behind) == (1, (0, 2))


def test_two_histories_of_the_same_length_are_told_apart():
    verdict = meet([record(0, 50), record(1, 50, lineage="another")], 2)
    assert (verdict.source, verdict.behind) == (0, (1,))


def test_whoever_comes_to_a_run_takes_its_state_however_far_it_was():
    verdict = meet([record(0, 100), record(1, 60, member=True)], 2)
    assert verdict.complete and (verdict.source, verdict.behind) == (1, (0,))
    assert meet([record(0, 60, member=True)], 2).complete


def test_a_member_that_lost_a_step_takes_it_from_one_that_made_it():
    verdict = meet([record(0, 60, member=True), record(1, 61, member=True)], 2)
    assert (verdict.source, verdict.behind) == (1, (0,))


def test_who_does_not_fit_is_refused_does_not_count_and_takes_nothing():
    others = [record(0), record(1, settings={"lr": 2, "ranks": 1})]
    verdict = meet(others, 2)
    assert verdict.refused == {
        1: "island 1 and island 0 must agree on lr: 2 here, 1 there; ranks: 1 here, None there"
    }
    assert not verdict.complete and verdict.behind == ()


def test_of_two_processes_with_one_id_the_one_that_was_there_first_stays():
    first, second = record(0), record(0, started=5.0, incarnation="0-second")
    for records in itertools.permutations([first, second, record(1)]):
        verdict = meet(records, 2)
        assert [records[i].incarnation for i in verdict.refused] == ["0-second"]
    assert list(meet([second, replace(first, member=True)], 2).refused) == [0]


def test_everybody_comes_to_the_same_verdict_in_whatever_order_the_group_is():
    records = [record(0, 7), record(1, 9, member=True), record(2, 9, member=True), record(3, run_id="other")]
    for order in itertools.permutations(records):
        verdict = meet(order, 2)
        assert order[verdict.source].island == 1
        assert sorted(order[i].island for i in verdict.behind) == [0]
        assert [order[i].island for i in verdict.refused] == [3]


def test_a_record_survives_its_way():
    account = Account(
        step=3, slot=1, tokens_total=9, lineage="l", origin="o", digest="d", positions={"a/1": 4}
    )
    account.share, account.tokens = {0: 1.5, 1: 0.5}, 7
    sent = record(2, member=True, account=account)
    assert Record.from_json(json.loads(json.dumps(sent.to_json()))) == sent


@pytest.mark.parametrize("change", [{"format": 0}, {"positions": {"a": "x"}}, {"share": {"x": 1}}])
def test_what_is_no_account_is_refused(change):
    with pytest.raises(ValueError, match=r"."):
        Account.from_json({**Account().to_json(), **change})


def test_accounts_of_the_same_steps_are_identical_and_of_any_other_are_not():
    def after(*steps: tuple[int, list[int], int, dict[str, int]], digest: str = "") -> str:
        account = Account(origin="weights")
        for step in steps:
            account.made(*step)
        if digest:
            account.close_slot(1, digest)
        return account.identity

    one = (1, [0, 1], 8, {"a/1": 4})
    same = after(one, digest="d")
    assert same == after(one, digest="d")
    others = [
        after(),
        after(one),
        after(one, digest="e"),
        after((1, [0], 8, {"a/1": 4})),
        after((1, [0, 1], 8, {"a/1": 5})),
    ]
    assert len({same, *others}) == 6


def test_weights_are_shares_of_the_slots_gradients():
    account = Account()
    account.made(1, [0, 1], 8, {})
    account.made(2, [0], 8, {})
    assert account.weights() == {0: 0.75, 1: 0.25} and account.tokens == account.tokens_total == 24
    account.close_slot(1, "d")
    account.made(3, [1], 8, {})
    assert account.weights() == {1: 1.0} and (account.tokens, account.tokens_total) == (8, 32)
