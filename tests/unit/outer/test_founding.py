"""How many islands may found a run, before and after patience is over."""

import pytest

from torchtitan_diloco.outer.founding import awaited, least, may_found


@pytest.mark.parametrize(
    "rule, islands, fewest",
    [("wait_all", 3, 3), ("majority", 2, 2), ("majority", 3, 2), ("majority", 4, 3), ("any", 4, 1)],
)
def test_all_found_at_once_and_fewer_only_where_the_rule_lets_them_when_patience_is_over(
    rule, islands, fewest
):
    assert least(rule, islands) == fewest
    for present in range(1, islands + 1):
        assert may_found(rule, islands, present, overdue=False) == (present == islands)
        assert may_found(rule, islands, present, overdue=True) == (present >= fewest)


def test_who_is_waited_for_is_said_with_when_fewer_will_do():
    assert awaited("wait_all", 3, 5.0) == "3 islands"
    assert awaited("majority", 2, 5.0) == "2 islands"
    assert awaited("any", 3, 5.0) == "3 islands, after 5 s (lighthouse.patience_s) for 1 of them"
