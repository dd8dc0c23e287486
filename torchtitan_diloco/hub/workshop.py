"""Where the hub's tensors are received, merged and kept: in this process, or (``crew``) spread over workers."""

from typing import Any

from torchtitan_diloco.hub.slot import Job
from torchtitan_diloco.hub.terms import Terms
from torchtitan_diloco.hub.upload import Upload
from torchtitan_diloco.outer.merge import Contribution
from torchtitan_diloco.outer.merger import Merger
from torchtitan_diloco.outer.policy import Member
from torchtitan_diloco.outer.state import OuterState


class Workshop:
    """In this process."""

    far = False
    """Whether islands send and fetch bulk somewhere else."""

    def merger(self, terms: Terms) -> Merger:
        """Of a run with these settings. Raises ValueError, TypeError or ArithmeticError where no hub could merge by them."""
        return terms.merger()

    def upload(self, kind: str, fragment: int, nbytes: int, member: Member) -> Upload:
        """Where something of a fragment goes: a "payload", "anchor" or "momentum". Raises Refusal."""
        return Upload(nbytes)

    def job(
        self, slot: int, fragment: int, contributions: list[Contribution], merger: Merger, state: OuterState
    ) -> Job:
        """The merge of a slot on the fragment as it is in ``state``."""
        return Job(slot, fragment, contributions, merger, state.outer_step(fragment, slot))

    async def sync(self) -> bool:
        """Learn what has arrived elsewhere; whether anything has. Raises Lost or Fenced."""
        return False

    def describe(self) -> list[dict[str, Any]]:
        """The workers, for people."""
        return []
