"""What a hub merges by: whatever it could not merge by is refused when an island comes with it."""

import json
import math
from typing import Any

import pytest

from tests.helpers.hub_words import terms_of
from torchtitan_diloco.hub.terms import Terms


def test_terms_survive_json() -> None:
    terms = terms_of()
    assert Terms.from_json(json.loads(json.dumps(terms.to_json()))) == terms


@pytest.mark.parametrize(
    "key, value",
    [
        ("semi_sync.num_islands", 0),
        ("semi_sync.num_islands", "2"),
        ("semi_sync.sync_every", 1),  # of two fragments each is sent once in it
        ("semi_sync.sync_every", 4.0),
        ("training.steps", 0),
        ("training.steps", 10**400),
        ("semi_sync.merge.method", "median"),
        ("semi_sync.merge.weight", "beauty"),
        ("semi_sync.codec.wire", "pigeon"),
        ("semi_sync.outer.momentum", "much"),
    ],
)
def test_terms_that_no_hub_could_merge_by_are_refused(key: str, value: Any) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        Terms.from_json(terms_of(**{key: value}).to_json())


@pytest.mark.parametrize(
    "changed",
    [
        {"sizes": []},
        {"sizes": [0, 1]},
        {"sizes": [1 << 60]},
        {"sizes": [1] * 10_001},
        {"sizes": "many"},
        {"settings": None},
        {"settings": {}},
    ],
)
def test_malformed_terms_are_refused(changed: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        Terms.from_json(terms_of().to_json() | changed)


def test_differences_name_the_settings() -> None:
    other = terms_of(**{"semi_sync.outer.lr": math.pi, "new": 1})
    assert terms_of().differences(other) == ["new", "semi_sync.outer.lr"]
    assert terms_of().differences(terms_of(sizes=(5, 9))) == ["fragments"]
    assert terms_of().differences(terms_of()) == []
