"""From deltas to bytes and back: the codec of each fragment, its residual, and the merge of what arrives."""

from collections.abc import Sequence

import torch

from torchtitan_diloco.config.own import CodecConfig, MergeConfig
from torchtitan_diloco.errors import UserError
from torchtitan_diloco.outer import buffers
from torchtitan_diloco.outer.codec import ErrorFeedback, SlicedPlan, make_codec, noise_seed
from torchtitan_diloco.outer.fragments import Fragment
from torchtitan_diloco.outer.merge import ELEMENTWISE
from torchtitan_diloco.outer.merger import Merger
from torchtitan_diloco.outer.slices import count_for, cut
from torchtitan_diloco.outer.values import Values, whole


class Wire:
    """On the gateway. Two threads use it: the training thread encodes and settles, the exchange thread has ``merge``.

    Memory per fragment: with error feedback, a float32 residual of its size (and one of the slices that the island owns, see
    ``outer.slices``). An encoded delta lasts as long as its slot.
    """

    def __init__(
        self,
        config: CodecConfig,
        merge: MergeConfig,
        fragments: Sequence[Fragment],
        run_id: str,
        island: int,
        islands: int = 1,
    ) -> None:
        """islands: how many found the run.

        Raises UserError naming the setting that the codec does not have, or the codecs and merge rules there are.
        """
        if merge.method != "mean":
            raise UserError(f'semi_sync.merge.method: "{merge.method}" is not a merge rule; there is "mean"')
        try:
            codec = make_codec(
                config.wire, block=config.block, density=config.density, rounding=config.rounding
            )
        except ValueError as error:
            raise UserError(f"semi_sync.codec: {error}") from error
        slices = count_for(islands) if merge.method in ELEMENTWISE else 1
        self._codec = codec
        self._run_id, self._island = run_id, island
        self._encoders = [SlicedPlan(codec, cut(f.numel, codec.unit, slices)) for f in fragments]
        # With plans of its own, since each serves one thread.
        self.merge = Merger(codec, merge.weight, fragments, slices, config.error_feedback, run_id, island)
        self._feedback = (
            [ErrorFeedback(encoder) for encoder in self._encoders] if config.error_feedback else None
        )

    def encode(self, fragment: int, slot: int, delta: Values) -> torch.Tensor:
        """The payload (uint8) for a delta (float32), which is used up.

        The delta passes through memory once: what is read of it is encoded while it is in the processor's cache.
        """
        if self._codec.is_plain and not self._feedback:
            return whole(delta).view(torch.uint8)  # as it is: nothing is lost
        buffer = self._payload(fragment)
        seed = noise_seed(self._run_id, slot, fragment, self._island) if self._codec.stochastic else None
        if self._feedback:
            self._feedback[fragment].propose(whole(delta), buffer, seed)
        else:
            self._encoders[fragment].encode(delta, buffer, seed)
        return buffer

    def blank(self, fragment: int) -> torch.Tensor:
        """A payload for a delta that cannot be sent; its header says that it does not count."""
        return self._payload(fragment).zero_()

    def _payload(self, fragment: int) -> torch.Tensor:
        return buffers.empty(self._encoders[fragment].nbytes, torch.uint8)

    def settle(self, fragment: int, slot: int, committed: bool, counted: bool) -> None:
        """The slot is over; the residual moves only if this island's bytes ``counted`` in it."""
        self.merge.settle(fragment, slot, committed)
        if self._feedback and self._feedback[fragment].is_open:
            if counted:
                self._feedback[fragment].commit()
            else:
                self._feedback[fragment].abandon()

    def reset(self, fragment: int) -> None:
        """The island has taken the fragment from another: what its own deltas had lost has no meaning any more."""
        self.merge.reset(fragment)
        if self._feedback:
            self._feedback[fragment].abandon()
            self._feedback[fragment].residual.zero_()

    def residuals(self) -> dict[str, torch.Tensor]:
        """For the checkpoint: ``residual.<fragment>``, and those of ``Merger``."""
        deltas = {f"residual.{i}": f.residual for i, f in enumerate(self._feedback or ())}
        return deltas | self.merge.residuals()

    def restore(self, tensors: dict[str, torch.Tensor]) -> None:
        """Raises ValueError when a residual is missing or has another length."""
        for i, feedback in enumerate(self._feedback or ()):
            saved = tensors.get(f"residual.{i}")
            if saved is None or saved.shape != feedback.residual.shape:
                raise ValueError(f"the residual of fragment {i} is missing or does not fit")
            feedback.residual.copy_(saved)
        self.merge.restore(tensors)
