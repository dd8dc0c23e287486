"""Faults planted in the arithmetic of the outer loop: the golden comparison must see each of them."""

from pathlib import Path

import pytest

from tests.golden.compare import Mismatch
from tests.golden.island import Case, Plan
from tests.golden.memory_run import MemoryRun
from tests.golden.turns import Stuck
from tests.helpers.faults import Fault, plant
from torchtitan_diloco.island import parameters
from torchtitan_diloco.outer import delta, fragments, merge, optimizer, policy, slots, state
from torchtitan_diloco.semi_sync import diloco

# Three islands, since of two the sum is the same in either order; unequal windows and batches.
PLANS = [Plan(3, 9, rows=2), Plan(2, 6, rows=3), Plan(4, 12, rows=1)]
LONG_PLANS = [Plan(6, 19, rows=2), Plan(8, 25, rows=3), Plan(7, 22, rows=1)]


PLAIN = Case()
LOCAL_SGD = Case("local_sgd")
FALLING = Case(schedule="cosine")
STREAMING = Case(fragments=3, overlap=1)
QUARTER = Case(fragments=2, overlap=1, alpha=0.25)
SEVERAL = Case(fragments=3, overlap=4)
EXCHANGE = """        step = self.apply(step, at_once)
        while self.next_slot < self.clock.reached(step) and not self.withdrawn:
            self.send(self.next_slot, step)
            self.next_slot += 1
            step = self.apply(step, at_once)
        return step"""
EXCHANGE_LATE = """        while self.next_slot < self.clock.reached(step) and not self.withdrawn:
            self.send(self.next_slot, step)
            self.next_slot += 1
        step = self.apply(step, at_once)
        return step"""

FAULTS = [
    Fault("sign of the delta", delta, "torch.sub(start[place], values, ", "torch.sub(values, start[place], ", PLAIN),
    Fault("sign of the update", optimizer,
          "torch.sub(anchor, delta, out=delta)", "torch.add(anchor, delta, out=delta)", PLAIN),
    Fault("momentum taken on the delta too", optimizer, "momentum += delta", "momentum += delta * self.momentum", PLAIN),
    Fault("lr inside the momentum", optimizer, "momentum += delta", "momentum += delta * self.lr", PLAIN),
    Fault("nesterov off", optimizer, "            if self.nesterov:", "            if False:", PLAIN),
    Fault("nesterov without its delta", optimizer, "                delta += scratch",
          "                delta.copy_(scratch)", PLAIN),
    Fault("nesterov with the old momentum", optimizer, "torch.mul(momentum, self.momentum, out=scratch)",
          "scratch.zero_() if old is None else torch.mul(old, self.momentum, out=scratch)", PLAIN),
    Fault("lr applied twice", optimizer, "delta *= self.lr", "delta *= self.lr * self.lr", PLAIN),
    Fault("constants not rounded to float32", optimizer, "delta *= self.lr",
          "delta.copy_((delta.double() * self.lr).float())", PLAIN),
    Fault("momentum without its history", optimizer, "torch.mul(old, self.momentum, out=momentum)",
          "momentum.zero_()", PLAIN),
    Fault("a schedule that is a slot late", optimizer, "min(1.0, slot / ", "min(1.0, (slot + 1) / ", FALLING),
    Fault("a schedule that falls to nothing", optimizer, "self.least + (1.0 - self.least) * left", "left", FALLING),
    Fault("lr of local SGD", optimizer, "delta *= self.lr", "delta *= self.lr / 2", LOCAL_SGD),
    Fault("the last piece left out", merge, "if start < self.delta.numel():", "if False:", PLAIN),
    Fault("divisor", merge, "value / total", "value / len(raw)", PLAIN),
    Fault("sum instead of mean", merge, "value / total", "1.0", LOCAL_SGD),
    Fault("weights swapped", merge, "    shares = weights([(c.steps, c.tokens) for c in ordered], kind)",
          "    shares = weights([(c.steps, c.tokens) for c in ordered], kind)[::-1]", PLAIN),
    Fault("tokens instead of tokens squared over steps", merge, "tokens * tokens / steps if", "float(tokens) if", PLAIN),
    Fault("steps in the wrong place", merge, "tokens * tokens / steps if", "tokens * steps if", PLAIN),
    Fault("tokens where steps were asked for", merge, "[float(steps) for steps, _ in counts]",
          "[float(tokens) for _, tokens in counts]", Case(weight="steps")),
    Fault("equal weights by steps", merge, "[1.0 if steps else 0.0 for steps, _ in counts]",
          "[float(steps) for steps, _ in counts]", Case(weight="equal")),
    Fault("order of the islands", merge, "key=lambda c: c.island)", "key=lambda c: -c.island)", PLAIN),
    Fault("an island left out", merge, "for contribution in ordered], shares,",
          "for contribution in ordered[:-1]], shares[:-1],", PLAIN),
    Fault("stale anchor", state, "advance.anchor, advance.momentum, *", "old.anchor, advance.momentum, *", PLAIN),
    Fault("momentum not kept", state, "advance.anchor, advance.momentum, *", "advance.anchor, None, *", PLAIN),
    Fault("momentum one slot late", state, "advance.anchor, advance.momentum, *",
          "advance.anchor, old.momentum, *", PLAIN),
    Fault("digest of the old anchor", state, "momentum, after.digest(),", "momentum, state.digest,", PLAIN),
    Fault("version not counted", state, "old.version + 1, advance", "old.version, advance", PLAIN),
    Fault("lineage without its history", state, "link(old.lineage, slot", 'link("", slot', PLAIN),
    Fault("committed tokens not added up", state, "lineage, old.tokens + tokens, trail", "lineage, tokens, trail", PLAIN),
    Fault("an island wrongly without a vote", policy, "header.steps > 0", "header.steps > 2", PLAIN),
    Fault("order of the tensors", fragments, "in sorted(rows, key=lambda r: (r[0].name, r[1])):", "in rows:", PLAIN),
    # What only shows with several fragments, overlap and mixing.
    Fault("momentum of another fragment", state,
          "_advance, self.optimizer.at(slot), self.states[fragment])",
          "_advance, self.optimizer.at(slot), replace(self.states[fragment], momentum=None if "
          "(m := self.states[fragment - 1].momentum) is None else m.repeat(9)[: self.fragments[fragment].numel]))",
          STREAMING),
    Fault("lineage of another fragment", state, "link(old.lineage, slot", "link(self.states[0].lineage, slot", STREAMING),
    Fault("fragments in another order", slots, "return slot % self.fragments",
          "return self.fragments - 1 - slot % self.fragments", STREAMING),
    Fault("a slot due one step early", slots, "step * self.fragments // every",
          "(step + 1) * self.fragments // every", STREAMING),
    Fault("a slot due one step late", slots, "step * self.fragments // every",
          "(step - 1) * self.fragments // every", STREAMING),
    Fault("fewer slots at the end", slots, "self.slots if step >= last", "self._regular + 1 if step >= last", STREAMING),
    Fault("applied one step early", diloco, "step + self.setup.config.overlap",
          "step + self.setup.config.overlap - 1", STREAMING),
    Fault("applied one step late", diloco, "step + self.setup.config.overlap",
          "step + self.setup.config.overlap + 1", STREAMING),
    Fault("applied after sending", diloco, EXCHANGE, EXCHANGE_LATE, STREAMING),
    Fault("only one result applied", diloco, "while self.flights and (at_once", "if self.flights and (at_once", SEVERAL),
    Fault("counters of the fragment not restarted", diloco,
          "self.setup.config.mix_alpha)\n            self.steps[index] = self.tokens[index] = 0",
          "self.setup.config.mix_alpha)", STREAMING),
    Fault("counters of all fragments restarted", diloco,
          "self.setup.config.mix_alpha)\n            self.steps[index] = self.tokens[index] = 0",
          "self.setup.config.mix_alpha)\n            self.steps = [0] * len(self.fragments)", STREAMING),
    Fault("counters restarted at the send", diloco,
          "self.setup.config.mix_alpha)\n            self.steps[index] = self.tokens[index] = 0",
          "self.setup.config.mix_alpha)\n            self.steps[index] = self.setup.config.overlap", STREAMING),
    Fault("delta from the anchor of another fragment", diloco, "PseudoGradient(fragment, state.anchor, local)",
          "PseudoGradient(fragment, torch.roll(state.anchor, 1), local)", STREAMING),
    Fault("base version stale", diloco, "                version=state.version,",
          "                version=state.version - (self.setup.island == 1),", STREAMING),
    Fault("anchor of another fragment scattered", diloco, "anchor = self.outer.states[index].anchor if",
          "anchor = self.outer.states[index - 1].anchor.repeat(9)[: self.fragments[index].numel] if", STREAMING),
    Fault("alpha swapped", parameters, "* alpha + values * (1.0 - alpha)", "* (1.0 - alpha) + values * alpha", QUARTER),
    Fault("alpha as one rounding", parameters, "values = held.to(\"cpu\", torch.float32) * alpha + values * (1.0 - alpha)",
          "values = torch.lerp(values, held.to(\"cpu\", torch.float32), alpha)", QUARTER),
    Fault("alpha left out", parameters, "        if alpha:", "        if False:", QUARTER),
    Fault("rows of another range", parameters, "part.within(piece.start), local)",
          "part.within(piece.start), Box((0, *local.offset[1:]), local.shape))", STREAMING),
]  # fmt: skip


def run_of(case: Case) -> MemoryRun:
    return MemoryRun(case, PLANS if case.fragments == 1 else LONG_PLANS)


@pytest.mark.parametrize("case", sorted({fault.case for fault in FAULTS}, key=repr), ids=repr)
def test_without_a_fault_the_comparison_passes(case: Case, tmp_path: Path):
    assert len(run_of(case).check(tmp_path)) >= 3


@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_planted_fault_is_seen(fault: Fault[Case], tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    plant(fault, monkeypatch)
    with pytest.raises((Mismatch, Stuck)):
        run_of(fault.case).check(tmp_path)
