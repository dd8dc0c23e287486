"""How the payloads of a slot become one delta: on each island for itself, or slice by slice at the slices' owners."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from torchtitan_diloco.outer import buffers
from torchtitan_diloco.outer.codec import Codec, SlicedPlan, noise_seed
from torchtitan_diloco.outer.fragments import Fragment
from torchtitan_diloco.outer.merge import Contribution, Merged, Weight, mean, weights
from torchtitan_diloco.outer.slices import cut


class Merger:
    """On the gateway. The exchange thread merges; the training thread says how each slot ended.

    With error feedback an owner adds to a merged slice what its encoding lost in the last slot in which it owned it. This
    residual moves at a commit only, and is dropped when the slice had another owner since. Tensors are replaced, never
    changed, so the threads do not meet.
    """

    def __init__(
        self,
        codec: Codec,
        weight: Weight,
        fragments: Sequence[Fragment],
        slices: int,
        error_feedback: bool,
        run_id: str,
        island: int,
    ) -> None:
        self._codec = codec
        self._weight: Weight = weight
        self._plans = [SlicedPlan(codec, cut(f.numel, codec.unit, slices)) for f in fragments]
        self._error_feedback = error_feedback and not codec.is_plain
        self._run_id, self._island = run_id, island
        self._residuals: list[dict[int, torch.Tensor]] = [{} for _ in fragments]  # by slice
        self._candidates: dict[int, tuple[int, dict[int, torch.Tensor]]] = {}  # fragment -> slot, by slice

    def __call__(self, fragment: int, contributions: Sequence[Contribution]) -> tuple[Merged, list[float]]:
        """Decode and merge whole payloads: (merged delta, weights)."""
        self._candidates.pop(fragment, None)
        return mean(contributions, self._weight, self._plans[fragment])

    def sizes(self, fragment: int) -> tuple[int, ...]:
        """Bytes of each encoded slice; a payload is one after the other."""
        return tuple(s.nbytes for s in self._plans[fragment].slices)

    def own(
        self, fragment: int, slot: int, slices: Sequence[int], contributions: Sequence[Contribution]
    ) -> tuple[torch.Tensor, list[float]]:
        """Merge the slices this island owns and encode the result: (uint8, weights).

        contributions: their payloads are of these slices only, one after the other.
        """
        plan, kept, candidates = self._plans[fragment], self._residuals[fragment], {}
        shares = weights([(c.steps, c.tokens) for c in contributions], self._weight)
        if self._codec.is_plain and len(slices) == len(plan.slices):
            self._candidates[fragment] = (slot, {})
            return mean(contributions, self._weight, plan)[0].whole().view(torch.uint8), shares
        # Numbered behind the deltas, so that no noise is used twice.
        seed = noise_seed(self._run_id, slot, len(self._plans) + fragment, self._island)
        encoded = buffers.empty(sum(plan.slices[j].nbytes for j in slices), torch.uint8)
        low = 0
        for j in slices:
            part = plan.slices[j]
            here = slice(low, low + part.nbytes)
            low += part.nbytes
            parts = [replace(c, payload=c.payload[here], spare=False) for c in contributions]
            merged = mean(parts, self._weight, part.plan)[0].whole()
            if not self._error_feedback:
                part.plan.encode(merged, encoded[here], seed, first=part.start)
                continue
            if j in kept:
                merged += kept[j]
            part.plan.encode(merged, encoded[here], seed, error=merged, first=part.start)
            if part.nbytes:  # a fragment of few units leaves some slices empty
                candidates[j] = merged
        self._candidates[fragment] = (slot, candidates)
        return encoded, shares

    def decode(self, fragment: int, payload: torch.Tensor) -> Merged:
        """The merged delta from all slices as their owners encoded them."""
        plan = self._plans[fragment]
        delta = buffers.empty(plan.numel, plan.dtype)
        plan.decode(payload, delta)
        return Merged.of(delta)

    def settle(self, fragment: int, slot: int, committed: bool) -> None:
        """The slot is over. If it was merged by owners, this island's residuals are now those of the slices it owned."""
        merged_in, candidates = self._candidates.pop(fragment, (None, {}))
        if committed and merged_in == slot:
            self._residuals[fragment] = candidates

    def propose(self, fragment: int, slot: int, residuals: Mapping[str, torch.Tensor]) -> None:
        """As ``own``, which was done elsewhere and has left these, by the names that ``residuals`` has for them."""
        names = {self._name(fragment, j): j for j in range(len(self._plans[fragment].slices))}
        self._candidates[fragment] = (slot, {names[name]: residual for name, residual in residuals.items()})

    def kept(self, fragment: int) -> dict[str, torch.Tensor]:
        """As ``residuals``, of one fragment."""
        return {self._name(fragment, j): residual for j, residual in self._residuals[fragment].items()}

    def reset(self, fragment: int) -> None:
        """The fragment was taken from another island, so others may have owned its slices meanwhile."""
        self._candidates.pop(fragment, None)
        self._residuals[fragment] = {}

    def residuals(self) -> dict[str, torch.Tensor]:
        """For the checkpoint: ``residual.<fragment>[start:stop]``, of the values of each slice that has one."""
        return {name: kept for f in range(len(self._plans)) for name, kept in self.kept(f).items()}

    def restore(self, tensors: dict[str, torch.Tensor]) -> None:
        """Slices that had no residual, or were cut otherwise, begin without. Raises ValueError for another length."""
        for f, plan in enumerate(self._plans):
            names = {j: self._name(f, j) for j in range(len(plan.slices))}
            self._residuals[f] = {j: tensors[name] for j, name in names.items() if name in tensors}
            for j, residual in self._residuals[f].items():
                if residual.shape != (plan.slices[j].plan.numel,):
                    raise ValueError(f"{names[j]} has {residual.numel()} values")

    def _name(self, fragment: int, j: int) -> str:
        part = self._plans[fragment].slices[j]
        return f"residual.{fragment}[{part.start}:{part.stop}]"
