"""Islands of one and of two ranks average their gradients as one island of all ranks would; one that dies comes back equal.

All cases share one start, see ``tests.helpers.world``.
"""

import json

import pytest

from tests.helpers import in_step, tiny
from tests.helpers.replicas import lighthouse
from tests.helpers.world import facts, run_cases
from torchtitan_diloco.observe.reading import EventTail

pytestmark = pytest.mark.slow

KILLED_STEPS = 40
TWICE = {"training.global_batch_size": 16}  # of 8 rows that four ranks read at once; of 4, on an island


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("in-step")
    ours = "tests.helpers.in_step"
    alone = {"call": "tests.helpers.islands:run_case", "method": "none", "folder": str(folder)}
    cases = {
        "one of 2": {**alone, "size": 2, "options": in_step.OPTIONS},
        "one of 4": {**alone, "size": 4, "options": in_step.OPTIONS},
        "one of 4, twice": {**alone, "size": 4, "options": {**in_step.OPTIONS, **TWICE}},
    }
    with lighthouse() as first, lighthouse() as second, lighthouse() as third, lighthouse() as fourth:
        for name, address, ranks, options in (
            ("two of 1", first, 1, {}),
            ("two of 2", second, 2, {}),
            ("two of 2, twice", third, 2, {"training.global_batch_size": 8}),
            ("lost", fourth, 2, {"steps": KILLED_STEPS}),
        ):
            parts = 3 if name == "lost" else 2
            cases[name] = {
                "call": f"{ours}:lose_one" if name == "lost" else f"{ours}:train",
                "size": parts * ranks,
                "lighthouse": address,
                "folder": str(folder / name),
                "ports": [tiny.free_port() for _ in range(parts)],
                "ranks": ranks,
                "options": options,
            }
        run_cases(folder, cases, timeout_s=60)
    return folder


@pytest.mark.parametrize(
    "islands, alone, hooked",
    [
        ("two of 1", "one of 2", True),
        ("two of 2", "one of 4", True),
        ("two of 2, twice", "one of 4, twice", False),
    ],
)
def test_islands_train_as_one_island_of_all_their_ranks(islands, alone, hooked, folder):
    ranks, (reference, *_) = facts(folder, islands), facts(folder, alone)
    assert [rank["hooked"] for rank in ranks] == [hooked] * len(ranks)
    half = len(ranks) // 2
    first, second = ranks[0], ranks[half]
    assert first["weights"] == second["weights"]
    assert len(first["logged"]) == len(second["logged"]) == len(reference["logged"]) == in_step.STEPS
    for (loss, norm), (other_loss, other_norm), (expected_loss, expected_norm) in zip(
        first["logged"], second["logged"], reference["logged"], strict=True
    ):
        assert norm == other_norm == pytest.approx(expected_norm, rel=1e-3)
        assert loss != other_loss
        assert (loss + other_loss) / 2 == pytest.approx(expected_loss, rel=1e-4)
    norms = [norm for _, norm in first["logged"]]
    assert max(norms) > 0.5 and first["logged"][-1][0] < first["logged"][0][0]


def test_an_island_whose_rank_dies_in_a_step_comes_back_equal(folder):
    outcomes = json.loads((folder / "lost.json").read_text())
    assert "facts" not in outcomes[2] and "facts" not in outcomes[3]
    survivor, back = (outcomes[i]["facts"] for i in (0, 4))
    assert survivor["weights"] == back["weights"] is not None
    assert len(survivor["logged"]) == KILLED_STEPS and 2 < len(back["logged"]) < KILLED_STEPS - 6
    assert [norm for _, norm in back["logged"]] == [
        norm for _, norm in survivor["logged"][-len(back["logged"]) :]
    ]
    events = {i: list(EventTail(folder / "lost" / f"island-{i}" / "events.jsonl").read()) for i in (0, 1)}
    returned = [e for e in events[1] if e["incarnation"] == "second" and e["event"] != "waiting"]
    kinds = [e["event"] for e in returned]
    assert kinds[:3] == ["start", "heal", "join"]
    assert kinds[3 : kinds.index("inner")] in ([], ["round"])  # its first step may be a slot's last
    heal, join, first = (*returned[1:3], returned[kinds.index("inner")])
    assert heal["source"] == 0 and first["step"] == join["step"] + 1 == heal["version"] + 1
    digests = [{e["round"]: e["digest"] for e in events[i] if e["event"] == "round"} for i in (0, 1)]
    common = digests[0].keys() & digests[1].keys()
    assert len(common) >= 3 and all(digests[0][slot] == digests[1][slot] for slot in common)
    weights = {e["round"]: e["weights"] for e in events[0] if e["event"] == "round"}
    assert weights[0] == pytest.approx([(3 / 2 + 1) / 4, 3 / 8])  # three steps of both, one alone
    assert weights[max(weights)] == [0.5, 0.5]
