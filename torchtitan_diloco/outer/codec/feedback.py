"""Error feedback: what a codec lost in one slot is added to the delta of the next (Seide et al. 2014; 1-bit SGD).

With residual e: t = delta + e is encoded, and once the slot has committed e becomes t - decoded. So the sum of what
was decoded and the last residual is the sum of all deltas.
"""

import torch

from torchtitan_diloco.outer.codec.codec import Plan
from torchtitan_diloco.outer.codec.sliced import SlicedPlan


class ErrorFeedback:
    """The residual of one island's fragment.

    Memory: the residual, 4 bytes a value, and nothing else; what it may become is kept in the delta's own buffer.
    The residual belongs to the durable state of an island: save ``residual``, hand it in again at a restart.
    """

    def __init__(
        self,
        plan: Plan | SlicedPlan,
        residual: torch.Tensor | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        """residual: float32 ``[plan.numel]``, taken over as it is; zeros by default. Raises ValueError on another shape."""
        if residual is None:
            residual = torch.zeros(plan.numel, device=device)
        if residual.dtype != torch.float32 or residual.shape != (plan.numel,):
            raise ValueError(
                f"the residual must be float32 of {plan.numel} values, got {tuple(residual.shape)}"
            )
        self.plan = plan
        self.residual = residual
        self._candidate: torch.Tensor | None = None

    @property
    def is_open(self) -> bool:
        """Whether a proposal waits for the outcome of its slot."""
        return self._candidate is not None

    def propose(self, delta: torch.Tensor, buffer: torch.Tensor, seed: int | None = None) -> None:
        """Encode delta + residual into ``buffer``; ``residual`` stays as it is.

        delta: float32 ``[numel]``, finite; overwritten with the candidate, and not to be touched until ``commit`` or
        ``abandon``. Raises ValueError where ``Plan.encode`` does, before anything is overwritten; RuntimeError while an
        earlier proposal is open.
        """
        if self.is_open:
            raise RuntimeError("an earlier proposal has neither been committed nor abandoned")
        self.plan.check(delta, buffer, seed)
        delta.add_(self.residual)
        self.plan.encode(delta, buffer, seed, error=delta)
        self._candidate = delta

    def commit(self) -> None:
        """The slot counts, and this island's bytes in it: the residual becomes what they lost."""
        if self._candidate is None:
            raise RuntimeError("there is no open proposal to commit")
        self.residual.copy_(self._candidate)
        self._candidate = None

    def abandon(self) -> None:
        """The slot failed, or this island's bytes do not count in it: as if it had never been. Harmless without one."""
        self._candidate = None
