"""Gradient averaging in every step: same bits on all islands, and the bits of a run in which nothing went wrong."""

import random
import re
import threading
import time
from functools import partial

import pytest
import torch
from torch import nn

from tests.helpers.replicas import (
    ROWS,
    STEPS,
    Feed,
    Gone,
    Learner,
    batch,
    lighthouse,
    lighthouse_process,
    lose,
    make_model,
    run_all,
)
from torchtitan_diloco.data.run_audit import audit_run
from torchtitan_diloco.errors import Resumable, UserError
from torchtitan_diloco.observe.reading import EventTail
from torchtitan_diloco.semi_sync import assembly


@pytest.fixture
def address():
    with lighthouse() as address:
        yield address


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> list[Learner]:
    with lighthouse() as address:
        learners = [Learner(i, address, tmp_path_factory.mktemp("undisturbed")) for i in (0, 1)]
        run_all(*learners)
    assert [learner.raised for learner in learners] == [None, None]
    return learners


def events(learner: Learner, kind: str) -> list[dict]:
    found = EventTail(learner.folder / f"island-{learner.number}" / "events.jsonl").read()
    return [e for e in found if e["event"] == kind]


def equal(*learners: Learner) -> bool:
    first, *others = learners
    return all(
        torch.equal(first.weights, o.weights) and torch.equal(first.moments, o.moments) for o in others
    )


def test_islands_train_as_one_with_twice_the_batch_and_clip_the_norm_of_the_averaged_gradient(undisturbed):
    assert equal(*undisturbed)
    assert undisturbed[0].norms == undisturbed[1].norms
    model, norms = make_model(0), {}
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    for step in range(1, STEPS + 1):
        optimizer.zero_grad()
        model(torch.cat([batch(0, step), batch(1, step)])).square().mean().backward()
        norms[step] = float(nn.utils.clip_grad_norm_(model.parameters(), 0.5))
        optimizer.step()
    assert undisturbed[0].norms == pytest.approx(norms, rel=1e-4)
    assert max(norms.values()) > 0.5  # it was clipped indeed
    torch.testing.assert_close(
        undisturbed[0].weights,
        nn.utils.parameters_to_vector(model.parameters()).detach(),
        rtol=1e-3,
        atol=1e-4,
    )


def test_a_slot_sums_up_its_steps(undisturbed):
    for learner in undisturbed:
        rounds = events(learner, "round")
        assert [e["round"] for e in rounds] == [0, 1] and [e["version"] for e in rounds] == [4, 8]
        size = learner.weights.nbytes
        for e in rounds:
            assert (e["participants"], e["weights"], e["tokens"]) == ([0, 1], [0.5, 0.5], 2 * 4 * ROWS)
            assert e["bytes_sent"] == 4 * size and e["exchange_s"] <= e["stall_s"] < 10
        assert events(learner, "heal") == [] and [e["slot"] for e in events(learner, "join")] == [0]
    assert [e["digest"] for e in events(undisturbed[0], "round")] == [
        e["digest"] for e in events(undisturbed[1], "round")
    ]


@pytest.mark.parametrize("lost", [1, 3, STEPS])
def test_an_island_that_lost_a_vote_takes_the_step_from_one_that_made_it(
    lost, address, tmp_path, undisturbed
):
    learners = [Learner(0, address, tmp_path), Learner(1, address, tmp_path, lost_votes={lost})]
    run_all(*learners)
    assert [learner.raised for learner in learners] == [None, None]
    assert learners[0].made == list(range(1, STEPS + 1))
    assert learners[1].made == [step for step in range(1, STEPS + 1) if step != lost]
    (heal,) = events(learners[1], "heal")
    assert (heal["source"], heal["version"]) == (0, lost) and events(learners[0], "heal") == []
    assert equal(*learners, *undisturbed)


@pytest.mark.parametrize("deaf", [1, 4])
def test_a_step_whose_gradients_did_not_reach_everybody_is_made_again_by_all(
    deaf, address, tmp_path, undisturbed
):
    learners = [Learner(0, address, tmp_path), Learner(1, address, tmp_path, deaf={deaf})]
    run_all(*learners)
    for learner in learners:
        assert learner.raised is None
        assert learner.made == list(range(1, STEPS + 1)) and events(learner, "heal") == []
    assert equal(*learners, *undisturbed)


def test_islands_that_begin_with_other_weights_take_those_of_the_lowest_id(address, tmp_path, undisturbed):
    learners = [Learner(0, address, tmp_path), Learner(1, address, tmp_path, seed=7)]
    run_all(*learners)
    (heal,) = events(learners[1], "heal")
    assert (heal["source"], heal["version"]) == (0, 0) and heal["bytes"] == learners[1].weights.nbytes
    assert events(learners[0], "heal") == []
    assert equal(*learners, *undisturbed)


def test_fr_33_a_lost_island_comes_back_with_parameters_and_moments_of_the_others(address, tmp_path):
    back = Learner(1, address, tmp_path, seed=9, incarnation="second", steps=40, started=1.0)
    thread = threading.Thread(target=back.run, daemon=True)
    alone = threading.Event()

    def restart(learner: Learner) -> None:
        thread.start()
        alone.set()

    survivor = Learner(0, address, tmp_path, steps=40, at={7: restart})
    victim = Learner(1, address, tmp_path, steps=40, at={4: lose})
    run_all(survivor, victim)
    thread.join(20)
    assert not thread.is_alive() and alone.is_set()
    assert isinstance(victim.raised, Gone) and survivor.raised is None and back.raised is None
    assert survivor.made == list(range(1, 41)) and victim.made == [1, 2, 3]
    heal = events(back, "heal")[-1]
    join = events(back, "join")[-1]
    assert heal["source"] == 0 and join["step"] == heal["version"] >= 6
    assert heal["bytes"] == back.weights.nbytes + back.moments.nbytes
    assert back.made == list(range(heal["version"] + 1, 41)) and len(back.made) > 2
    assert equal(survivor, back)
    mine, theirs = ({e["round"]: e["digest"] for e in events(x, "round")} for x in (survivor, back))
    assert theirs.items() <= mine.items() or all(mine[r] == d for r, d in theirs.items() if r in mine)
    weights = {e["round"]: e["weights"] for e in events(survivor, "round")}
    assert weights[0] == pytest.approx([(3 / 2 + 1) / 4, 3 / 8])  # three steps of both, one alone


@pytest.fixture(scope="module")
def three(tmp_path_factory) -> list[Learner]:
    with lighthouse() as address:
        learners = [Learner(i, address, tmp_path_factory.mktemp("three"), islands=3) for i in range(3)]
        run_all(*learners)
    assert equal(*learners)
    return learners


@pytest.mark.parametrize("seed", range(6))
def test_whatever_is_lost_on_the_way_the_bits_are_those_of_a_run_without_a_fault(
    seed, address, tmp_path, three
):
    chance = random.Random(seed)
    learners = [
        Learner(
            i,
            address,
            tmp_path,
            islands=3,
            lost_votes={n for n in range(1, 12) if chance.random() < 0.2},
            deaf={n for n in range(1, 12) if chance.random() < 0.1},
        )
        for i in range(3)
    ]
    assert any(learner.lost_votes or learner.deaf for learner in learners)
    run_all(*learners, within_s=50)
    assert [learner.raised for learner in learners] == [None] * 3
    assert {learner.method.account.step for learner in learners} == {STEPS}
    assert equal(*learners, *three)


def test_no_sample_is_trained_on_twice_or_passed_over_whatever_is_lost_on_the_way(address, tmp_path):
    """An island dies and comes back, votes and averages are lost: the ledgers' account is exact, step by step."""
    steps = 30
    back = Learner(1, address, tmp_path, feed=Feed(), seed=9, incarnation="second", steps=steps, started=1.0)
    thread = threading.Thread(target=back.run, daemon=True)
    fits = [
        Learner(
            0,
            address,
            tmp_path,
            feed=Feed(),
            steps=steps,
            lost_votes={5, 14},
            at={12: lambda _: thread.start()},
        ),
        Learner(1, address, tmp_path, feed=Feed(), steps=steps, deaf={3}, at={8: lose}),
    ]
    run_all(*fits)
    thread.join(20)
    assert not thread.is_alive() and fits[0].raised is None and back.raised is None
    assert equal(fits[0], back) and back.made
    report = audit_run([tmp_path])
    assert report.problems == [] and report.slot == steps - 1
    (epoch,) = report.epochs
    both = 2 * steps - (back.made[0] - 8)  # steps 8 to the one before its first were made alone
    assert epoch.consumed == both * ROWS and epoch.lost == epoch.repeated == 0
    assert fits[0].method.account.tokens_total == both * ROWS


def test_three_islands_wait_for_a_slow_one(address, tmp_path):
    slow = {step: lambda learner: time.sleep(0.4) for step in (2, 5)}
    learners = [Learner(i, address, tmp_path, islands=3, at=slow if i == 2 else {}) for i in range(3)]
    run_all(*learners)
    for learner in learners:
        assert learner.raised is None and learner.made == list(range(1, STEPS + 1))
        assert events(learner, "heal") == []
        assert [e["weights"] for e in events(learner, "round")] == [pytest.approx([1 / 3] * 3)] * 2
    assert equal(*learners)


def test_parameters_that_drift_apart_are_noticed_after_the_slot_and_made_equal(address, tmp_path):
    def bend(learner: Learner) -> None:
        with torch.no_grad():
            next(learner.model.parameters()).add_(1e-6)

    learners = [Learner(0, address, tmp_path), Learner(1, address, tmp_path, at={3: bend})]
    run_all(*learners)
    first, second = ([e["digest"] for e in events(learner, "round")] for learner in learners)
    assert first[0] != second[0] and first[1] == second[1]
    (heal,) = events(learners[1], "heal")
    assert (heal["source"], heal["version"]) == (0, 4)
    assert equal(*learners)


def test_with_several_backward_passes_the_gradients_travel_once(address, tmp_path, undisturbed):
    learners = [Learner(i, address, tmp_path, backwards=2) for i in (0, 1)]
    run_all(*learners)
    assert equal(*learners)
    torch.testing.assert_close(learners[0].weights, undisturbed[0].weights)
    assert [e["bytes_sent"] for e in events(learners[0], "round")] == [
        e["bytes_sent"] for e in events(undisturbed[0], "round")
    ]


@pytest.mark.parametrize(
    "other, sentence",
    [
        ({"width": 5}, r"island 1 and island 0 must agree on the ranks' shards: '\w+' here, '\w+' there"),
        (
            {"settings": {"optimizer.lr": 2.0}},
            "island 1 and island 0 must agree on optimizer.lr: 2.0 here, 1.0 there",
        ),
        (
            {"run_id": "another"},
            r"lighthouse.address: the islands of another run \(run\) ask this Lighthouse",
        ),
        (
            {"number": 0, "started": 1.0, "incarnation": "x"},
            "island.id: another process says that it is island 0",
        ),
    ],
    ids=["layout", "settings", "run", "twin"],
)
def test_an_island_that_does_not_fit_is_refused_and_the_others_train_on(
    other, sentence, address, tmp_path, undisturbed
):
    settings = {"optimizer.lr": 1.0}
    misfit = Learner(
        **{"number": 1, "address": address, "folder": tmp_path / "x", "settings": settings, **other}
    )
    late = threading.Event()
    fits = [Learner(i, address, tmp_path, settings=settings) for i in (0, 1)]
    alone = threading.Thread(target=fits[0].run, daemon=True)
    alone.start()
    run_all(misfit)
    late.set()
    assert isinstance(misfit.raised, UserError)
    assert re.match(sentence, str(misfit.raised)), misfit.raised
    assert "\n" not in str(misfit.raised) and misfit.made == []
    run_all(fits[1])
    alone.join(20)
    assert [learner.raised for learner in fits] == [None, None]
    assert equal(*fits, *undisturbed)


def test_a_lone_island_does_not_found_a_run_of_two(address, tmp_path):
    learner = Learner(0, address, tmp_path, patience_s=1.5)
    run_all(learner)
    assert isinstance(learner.raised, Resumable) and learner.made == []
    assert str(learner.raised) == "waited 1.5 s (lighthouse.patience_s) for 2 islands"


def test_an_island_that_stops_leaves_the_others_and_its_state_goes_on_from_its_account(
    address, tmp_path, undisturbed
):
    def stop(learner: Learner) -> None:
        learner.drain.request("SIGTERM")

    first = [Learner(i, address, tmp_path, at={5: stop}) for i in (0, 1)]
    run_all(*first)
    second = [Learner(i, address, tmp_path, incarnation="second") for i in (0, 1)]
    for before, after in zip(first, second, strict=True):
        description, tensors = before.method.state()
        assert tensors == {}
        after.model.load_state_dict(before.model.state_dict())
        after.optimizer.load_state_dict(before.optimizer.state_dict())
        after.method.restore(description, tensors)
    run_all(*second)
    assert [learner.raised for learner in second] == [None, None]
    assert events(second[0], "heal") == events(second[1], "heal") == []
    assert equal(*second, *undisturbed)


@pytest.fixture
def ended_by_one(address, tmp_path, monkeypatch) -> list[Learner]:
    """Two islands of a run that the second has left early, the first has ended, each with the state it was left with."""
    monkeypatch.setattr(assembly, "LINGER_S", 0.1)
    first = [
        Learner(i, address, tmp_path, at={5: lambda learner: learner.drain.request("SIGTERM")} if i else {})
        for i in (0, 1)
    ]
    run_all(*first)
    assert first[0].method.account.step == STEPS > first[1].method.account.step
    second = [Learner(i, address, tmp_path, incarnation="second", patience_s=20) for i in (0, 1)]
    for before, after in zip(first, second, strict=True):
        after.model.load_state_dict(before.model.state_dict())
        after.optimizer.load_state_dict(before.optimizer.state_dict())
        after.method.restore(*before.method.state())
    return second


def test_an_island_that_has_finished_comes_back_for_one_that_has_not(ended_by_one):
    run_all(*ended_by_one, within_s=15)
    assert [learner.raised for learner in ended_by_one] == [None, None]
    assert [learner.made for learner in ended_by_one] == [[], []]
    assert events(ended_by_one[1], "heal")[-1]["version"] == STEPS
    assert [learner.method.account.step for learner in ended_by_one] == [STEPS, STEPS]
    assert equal(*ended_by_one)


def test_an_island_that_has_finished_does_not_wait_for_ever(address, ended_by_one, caplog):
    island, _ = ended_by_one
    island.method.setup.make_lockstep = partial(_with_patience, island.method.setup.make_lockstep, 1.0)
    run_all(island, within_s=15)
    assert island.raised is None and island.made == []
    assert "islands [1] have not come within 1 s" in caplog.text


def _with_patience(make, patience_s, group):
    link = make(group)
    link.patience_s = patience_s
    return link


def test_an_island_that_has_finished_is_done_without_a_lighthouse(ended_by_one, caplog):
    def nobody(group):
        raise UserError("no Lighthouse answers")

    island, _ = ended_by_one
    island.method.setup.make_lockstep = nobody
    run_all(island, within_s=15)
    assert island.raised is None
    assert "leaves the others to themselves: no Lighthouse answers" in caplog.text


def test_a_run_outlives_its_lighthouse(tmp_path):
    """Quorum numbers, and with them the names of groups, begin again. Who is back first may make a step without the other."""
    servers = [lighthouse_process()]
    port, address = servers[0].port, servers[0].address

    def kill(learner: Learner) -> None:
        servers[0].end()
        servers.append(lighthouse_process(port))

    learners = [Learner(i, address, tmp_path, steps=12, at={6: kill} if i == 0 else {}) for i in (0, 1)]
    try:
        run_all(*learners, within_s=50)
        assert [learner.raised for learner in learners] == [None, None]
        assert equal(*learners)
        assert [learner.method.account.step for learner in learners] == [12, 12]
    finally:
        for server in servers:
            server.end()
