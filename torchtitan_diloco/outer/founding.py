"""When islands may found a run that nobody holds yet. Pure: the same answer for everybody who sees the same islands."""

from typing import Literal

Rule = Literal["wait_all", "majority", "any"]


def least(rule: str, islands: int) -> int:
    """How many of a run's ``islands`` may found it once patience is over."""
    return {"majority": islands // 2 + 1, "any": 1}.get(rule, islands)


def may_found(rule: str, islands: int, present: int, overdue: bool) -> bool:
    """Whether ``present`` islands are enough. overdue: one of them has waited for as long as it has patience."""
    return present >= (least(rule, islands) if overdue else islands)


def awaited(rule: str, islands: int, patience_s: float) -> str:
    """For whom a founder waits, in words: "3 islands, after 600 s (lighthouse.patience_s) for 2 of them"."""
    fewer = least(rule, islands)
    if fewer >= islands:
        return f"{islands} islands"
    return f"{islands} islands, after {patience_s:g} s (lighthouse.patience_s) for {fewer} of them"
