"""The gloo transport on real sockets: a real Lighthouse, two or three gateways in one process."""

import socket
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial

import pytest
import torch

from torchtitan_diloco.config.own import IslandConfig, LighthouseConfig, TransportConfig
from torchtitan_diloco.errors import Resumable, UserError
from torchtitan_diloco.exchange.gloo import GlooTransport
from torchtitan_diloco.exchange.messages import Outcome
from torchtitan_diloco.exchange.protocol import Merge
from torchtitan_diloco.exchange.transport import Hello, Joined
from torchtitan_diloco.outer.codec import make_codec
from torchtitan_diloco.outer.fragments import TensorSpec, whole_model
from torchtitan_diloco.outer.merge import Merged, Weight, mean
from torchtitan_diloco.outer.optimizer import OuterSGD
from torchtitan_diloco.outer.policy import Header
from torchtitan_diloco.outer.state import Advance, OuterState

SIZE = 1000
FRAGMENTS = whole_model([TensorSpec("w", (SIZE,), torch.float32)])


def merge_with(kind: Weight) -> Merge:
    plan = make_codec("fp32").prepare(SIZE)
    return lambda fragment, contributions: mean(contributions, kind, plan)


class Gateway:
    """An island reduced to its gateway: a transport, an outer state, and deltas made up on the spot."""

    def __init__(
        self,
        lighthouse: LighthouseConfig,
        island: int,
        value: float = 0.0,
        run_id: str = "run",
        merge: Merge | None = None,
        max_rate: float = 0.0,
        streams: int = 1,
        advertise: str = "",
    ) -> None:
        self.merged = torch.empty(0)  # of the last slot
        self.island, self.run_id, self.lighthouse = island, run_id, lighthouse
        self.state = OuterState.found(FRAGMENTS, OuterSGD(0.7, 0.9, True), [torch.full((SIZE,), value)])
        self.transport = GlooTransport(
            IslandConfig(id=island, advertise=advertise),
            lighthouse,
            TransportConfig(exchange_timeout_s=10.0, max_rate=max_rate, streams=streams),
            merge or merge_with("tokens"),
        )

    def join(
        self,
        num_islands: int,
        settings: dict[str, object] | None = None,
        step: int = 0,
        finished: bool = False,
        found: str = "wait_all",
    ) -> Joined:
        hello = Hello(
            self.island,
            f"start-{time.time_ns()}",
            time.time(),
            self.run_id,
            num_islands,
            settings or {"a": 1},
            step,
            finished,
            found,
        )
        return self.transport.join(hello, self.state)

    def offer(
        self, delta: float, steps: int = 4, finite: bool = True, payload: torch.Tensor | None = None
    ) -> None:
        """payload: of the delta, where it is not what fp32 makes of one value."""
        s = self.state
        header = Header(
            self.island, s.slot, 0, s.states[0].version, s.states[0].digest, s.states[0].lineage, s.tokens_total,
            steps, steps * 10, finite, {f"a/{self.island}": s.slot + 1}, {}, {"a": "0-7"}, False,
        )  # fmt: skip
        whole = torch.full((SIZE,), delta).view(torch.uint8) if payload is None else payload
        take = s.outer_step(0, 0)

        def outer_step(merged: Merged) -> Advance:
            self.merged = merged.whole().clone()
            return take(Merged.of(merged.delta))

        self.transport.offer(header, whole, outer_step)

    def settle(self, timeout_s: float = 20.0) -> Outcome:
        outcome = self.transport.result(self.state.slot, timeout_s)
        assert outcome is not None, f"no outcome in {timeout_s} s; waiting for {self.transport.waiting()}"
        if outcome.status == "committed":
            assert outcome.advance is not None
            self.state.commit(
                outcome.slot, 0, outcome.advance, list(outcome.participants), outcome.tokens,
                outcome.advanced, outcome.members,
            )  # fmt: skip
        elif outcome.status == "failed":
            self.state.fail(outcome.slot)
        self.transport.publish(self.state)
        return outcome

    def crash(self) -> None:
        """What the others see of a kill: no more heartbeats, messages refused, connections reset."""
        members, server = self.transport._members, self.transport._server
        assert members is not None and server is not None
        members._stop.set()
        members._kick.set()
        self.transport._left = True
        server.close()


def together(*calls) -> list[object]:
    with ThreadPoolExecutor(len(calls)) as pool:
        return [future.result(timeout=40) for future in [pool.submit(call) for call in calls]]


def founded(lighthouse: LighthouseConfig, count: int) -> list[Gateway]:
    gateways = [Gateway(lighthouse, island) for island in range(count)]
    together(*(partial(gateway.join, count) for gateway in gateways))
    return gateways


def leave(*gateways: Gateway, reason: str = "drain") -> None:
    together(*(partial(gateway.transport.leave, reason) for gateway in gateways))


def test_islands_with_equal_weights_found_without_a_heal_and_commit_the_same_bits(
    lighthouse: LighthouseConfig,
) -> None:
    gateways = founded(lighthouse, 3)
    for slot in range(3):
        for gateway in gateways:
            gateway.offer(float(gateway.island + 1))
        outcomes = [gateway.settle() for gateway in gateways]
        assert [o.status for o in outcomes] == ["committed"] * 3
        assert all(o.participants == (0, 1, 2) and o.slot == slot for o in outcomes)
        assert gateways[0].merged.tolist() == pytest.approx([2.0] * SIZE)
        assert outcomes[0].bytes_sent == outcomes[0].bytes_received == 2 * 4 * SIZE
    assert len({g.state.states[0].digest for g in gateways}) == len({g.state.lineage for g in gateways}) == 1
    leave(*gateways)


def test_fr_09_whatever_the_host_is_called_peers_are_given_the_advertised_address(
    lighthouse: LighthouseConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "no-such-host.invalid")
    a, b = Gateway(lighthouse, 0), Gateway(lighthouse, 1, advertise="127.0.0.2")
    together(partial(a.join, 2), partial(b.join, 2))
    for gateway in (a, b):
        gateway.offer(1.0)
    assert [gateway.settle().status for gateway in (a, b)] == ["committed"] * 2
    assert a.transport._members is not None
    (seen,) = [peer for peer in a.transport._members.peers if peer.island == 1]
    assert seen.url.startswith("http://127.0.0.2:") and seen.store.startswith("127.0.0.2:")
    leave(a, b)


def test_islands_with_different_weights_found_from_the_lowest_id(lighthouse: LighthouseConfig) -> None:
    a, b = Gateway(lighthouse, 0, value=1.0), Gateway(lighthouse, 1, value=2.0)
    joined_b, joined_a = together(partial(b.join, 2), partial(a.join, 2))
    assert isinstance(joined_a, Joined) and isinstance(joined_b, Joined)
    assert joined_a.heals == ()
    assert [heal.source for heal in joined_b.heals] == [0]
    assert torch.equal(b.state.states[0].anchor, torch.full((SIZE,), 1.0))
    leave(a, b)


def test_the_longest_history_wins_whatever_the_id(lighthouse: LighthouseConfig) -> None:
    """FR-06: an island with history and a fresh one start together."""
    a, b = Gateway(lighthouse, 0, value=2.0), Gateway(lighthouse, 1, value=1.0)
    b.state.commit(
        0, 0, b.state.outer_step(0, 0)(Merged.of(torch.zeros(SIZE))), [1], 100, {"a/1": 5}, {1: {"a": "0-7"}}
    )
    joined_a, joined_b = together(partial(a.join, 2), partial(b.join, 2, step=17))
    assert isinstance(joined_a, Joined) and isinstance(joined_b, Joined)
    assert joined_b.heals == () and joined_b.step == 17
    assert joined_a.step == 17 and [heal.version for heal in joined_a.heals] == [1]
    assert a.state.describe() == b.state.describe()
    assert torch.equal(a.state.states[0].anchor, b.state.states[0].anchor)
    leave(a, b)


def test_a_joiner_takes_anchor_momentum_and_step_and_joins_the_next_slot(
    lighthouse: LighthouseConfig,
) -> None:
    (a,) = founded(lighthouse, 1)
    a.offer(3.0)
    assert a.settle().status == "committed"
    a.transport.progress(42)
    b = Gateway(lighthouse, 1, value=9.0)
    joined = b.join(1)
    assert joined.step == 42 and len(joined.heals) == 1 and joined.heals[0].bytes == 2 * 4 * SIZE
    for name, tensor in a.state.tensors().items():
        assert torch.equal(tensor, b.state.tensors()[name])
    a.offer(1.0)
    b.offer(5.0)
    assert a.settle().participants == b.settle().participants == (0, 1)
    assert a.state.states[0].digest == b.state.states[0].digest
    leave(a, b)


def test_a_peer_that_dies_while_others_wait_for_its_header_is_left_out(lighthouse: LighthouseConfig) -> None:
    a, b, c = founded(lighthouse, 3)
    a.offer(1.0)
    c.offer(3.0)
    time.sleep(0.5)
    waiting = a.transport.waiting()
    assert waiting is not None and waiting.target == (1,)
    b.crash()
    began = time.monotonic()
    assert a.settle().participants == c.settle().participants == (0, 2)
    assert (
        time.monotonic() - began < 5.0
    )  # heartbeat time-out 1 s + join time-out 0.3 s, not the exchange's 10 s
    leave(a, c)


@pytest.mark.parametrize("goodbye", [False, True], ids=["killed", "one of its ranks was"])
def test_a_finished_island_stays_for_one_that_was_lost_until_it_has_the_final_state(
    lighthouse: LighthouseConfig, goodbye: bool
) -> None:
    a, b = founded(lighthouse, 2)
    if goodbye:
        b.transport.leave("failure")
    else:
        b.crash()
        time.sleep(2.0)  # past the heartbeat time-out
    a.offer(1.0)
    assert a.settle().participants == (0,)
    with ThreadPoolExecutor(1) as pool:
        leaving = pool.submit(a.transport.leave, "done")
        time.sleep(1.0)
        assert not leaving.done()
        again = Gateway(lighthouse, 1, value=5.0)
        again.join(2)
        assert again.state.describe() == a.state.describe()
        again.transport.leave("done")
        leaving.result(timeout=10)


def started_again(lighthouse: LighthouseConfig, count: int, slots: int) -> list[Gateway]:
    """Islands of a run that is over: all but the last one have committed ``slots`` slots, that one has founded it."""
    *done, lost = founded(lighthouse, count)
    lost.transport.leave("drain")
    for _ in range(slots):
        for gateway in done:
            gateway.offer(1.0)
        assert {gateway.settle().status for gateway in done} == {"committed"}
    leave(*done, reason="done")
    again = [Gateway(lighthouse, island) for island in range(count)]
    for gateway, before in zip(again, [*done, lost], strict=True):
        gateway.state.restore(before.state.describe(), before.state.tensors())
    return again


def test_a_fault_in_the_exchange_ends_training_instead_of_leaving_it_waiting(
    lighthouse: LighthouseConfig,
) -> None:
    a, b = Gateway(lighthouse, 0), Gateway(lighthouse, 1)
    together(*(partial(gateway.join, 2) for gateway in (a, b)))

    def fault(*_: object) -> None:
        raise ZeroDivisionError("of a merge rule")

    a.transport._protocol.merge = fault  # type: ignore[assignment]
    a.offer(1.0)
    b.offer(2.0)
    with pytest.raises(RuntimeError, match="the exchange thread has ended: of a merge rule"):
        a.settle()
    leave(a, b, reason="failure")


@pytest.mark.parametrize("count", [2, 3])
def test_islands_that_have_finished_come_back_for_one_that_has_not(
    lighthouse: LighthouseConfig, count: int
) -> None:
    *done, lost = started_again(lighthouse, count, slots=2)
    with ThreadPoolExecutor(count) as pool:
        joining = [pool.submit(partial(g.join, count, step=8, finished=True)) for g in done]
        time.sleep(1.0)
        assert not any(future.done() for future in joining)
        assert lost.join(count, step=2).step == 8
        assert lost.state.describe() == done[0].state.describe()
        assert [future.result(timeout=10) for future in joining] == [Joined(8)] * len(done)
    began = time.monotonic()
    leave(*done, lost, reason="done")
    assert time.monotonic() - began < 5.0


def test_finished_islands_that_come_back_together_wait_for_nobody(lighthouse: LighthouseConfig) -> None:
    a, b, _ = started_again(lighthouse, 3, slots=1)
    together(*(partial(gateway.join, 2, step=4, finished=True) for gateway in (a, b)))
    leave(a, b, reason="done")


def test_a_finished_island_waits_for_the_others_as_long_as_its_patience(lighthouse: LighthouseConfig) -> None:
    a, _ = started_again(lighthouse, 2, slots=1)
    a.transport._lighthouse = replace(lighthouse, patience_s=1.0)
    with pytest.raises(
        Resumable,
        match=r"waited 1 s \(lighthouse.patience_s\) for islands that have not finished; islands present: 0",
    ):
        a.join(2, step=4, finished=True)
    began = time.monotonic()
    a.transport.leave("done")
    assert time.monotonic() - began < 5.0


def test_finished_islands_do_not_wait_for_one_another(lighthouse: LighthouseConfig) -> None:
    a, b = founded(lighthouse, 2)
    a.offer(1.0)
    b.offer(1.0)
    a.settle()
    b.settle()
    began = time.monotonic()
    leave(a, b, reason="done")
    assert time.monotonic() - began < 5.0


def test_an_island_that_leaves_is_waited_for_by_nobody(lighthouse: LighthouseConfig) -> None:
    a, b = founded(lighthouse, 2)
    leave(b)
    a.offer(1.0)
    assert a.settle(5.0).participants == (0,)
    leave(a)


def test_a_delta_that_is_not_finite_is_left_out_and_its_island_applies_the_rest(
    lighthouse: LighthouseConfig,
) -> None:
    a, b = founded(lighthouse, 2)
    a.offer(1.0)
    b.offer(float("nan"), finite=False)
    outcomes = a.settle(), b.settle()
    assert [o.participants for o in outcomes] == [(0,), (0,)]
    # What does not count is not sent.
    assert [(o.bytes_sent, o.bytes_received) for o in outcomes] == [(4 * SIZE, 0), (0, 4 * SIZE)]
    assert a.state.states[0].digest == b.state.states[0].digest
    leave(a, b)


def test_a_slot_is_withdrawn_before_it_is_confirmed(lighthouse: LighthouseConfig) -> None:
    a, b = founded(lighthouse, 2)
    a.offer(1.0)
    a.transport.withdraw()
    assert a.settle().status == "withdrawn"
    leave(a)
    b.offer(2.0)
    assert b.settle().participants == (1,)
    leave(b)


def test_islands_whose_settings_differ_refuse_naming_the_keys(lighthouse: LighthouseConfig) -> None:
    a, b = Gateway(lighthouse, 0), Gateway(lighthouse, 1)
    errors: list[str] = []

    def join(gateway: Gateway, manifest: str) -> None:
        try:
            with pytest.raises(UserError) as caught:
                gateway.join(2, {"data manifest": manifest, "same": 1})
            errors.append(str(caught.value))
        finally:
            gateway.transport.leave("refused")

    pool = ThreadPoolExecutor(2)
    first: Future[None] = pool.submit(join, a, "aaa")
    second = pool.submit(join, b, "bbb")
    first.result(timeout=20)
    a_error = errors[0]
    assert "must agree on data manifest" in a_error and "same" not in a_error
    b.transport.stop()
    # The other is refused as well, or stopped while it waits for an island that has gone.
    assert second.exception(timeout=20) is None or isinstance(second.exception(), AssertionError | Resumable)


def test_no_lighthouse_is_said_in_one_sentence_within_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torchtitan_diloco.exchange.gloo.REACH_S", 1.0)
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{closed.getsockname()[1]}"
    gateway = Gateway(LighthouseConfig(address=address), 0)
    began = time.monotonic()
    with pytest.raises(UserError, match=r"lighthouse\.address = http://127.0.0.1:\d+: no Lighthouse answers"):
        gateway.join(1)
    assert time.monotonic() - began < 8.0
    gateway.transport.leave("refused")


def test_a_taken_port_is_named() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        transport = GlooTransport(
            IslandConfig(id=0, port=port, advertise="127.0.0.1"), LighthouseConfig(address="http://127.0.0.1:1"),
            TransportConfig(), merge_with("equal"),
        )  # fmt: skip
        state = OuterState.found(FRAGMENTS, OuterSGD(1.0), [torch.zeros(SIZE)])
        with pytest.raises(UserError, match=rf"island\.port = {port}: cannot listen"):
            transport.join(Hello(0, "x", 0.0, "run", 1, {}, 0), state)


def test_patience_ends_a_wait_for_missing_islands_with_who_is_missing(lighthouse: LighthouseConfig) -> None:
    lighthouse.patience_s = 1.0
    gateway = Gateway(lighthouse, 0)
    with pytest.raises(
        Resumable, match=r"waited 1 s \(lighthouse\.patience_s\) for 2 islands; islands present: 0"
    ):
        gateway.join(2)
    gateway.transport.leave("patience")


def test_a_stop_ends_a_wait_at_once(lighthouse: LighthouseConfig) -> None:
    gateway = Gateway(lighthouse, 0)
    threading.Timer(0.5, gateway.transport.stop).start()
    began = time.monotonic()
    with pytest.raises(Resumable):
        gateway.join(2)
    assert time.monotonic() - began < 3.0
    gateway.transport.leave("stopped")


def test_islands_of_different_runs_on_one_lighthouse_never_meet(lighthouse: LighthouseConfig) -> None:
    a, b = Gateway(lighthouse, 0, value=1.0), Gateway(lighthouse, 0, value=2.0, run_id="another run")
    together(partial(a.join, 1), partial(b.join, 1))
    a.offer(1.0)
    b.offer(2.0)
    assert a.settle().participants == b.settle().participants == (0,)
    assert a.state.states[0].digest != b.state.states[0].digest
    leave(a, b)
