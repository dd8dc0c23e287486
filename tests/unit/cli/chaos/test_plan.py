"""What a plan may say, and what is said about one that is wrong."""

from pathlib import Path

import pytest

from torchtitan_diloco.cli.chaos.plan import KINDS, Fault, draw, load_plan
from torchtitan_diloco.errors import UserError


def plan_file(folder: Path, text: str) -> Path:
    path = folder / "plan.toml"
    path.write_text(text)
    return path


def test_scripted_faults_come_in_their_order(tmp_path: Path) -> None:
    text = """
    duration_s = 60
    [[faults]]
    at_s = 20
    kind = "meeting"
    lasts_s = 3
    [[faults]]
    at_s = 5
    kind = "kill"
    island = 1
    """
    plan = load_plan(plan_file(tmp_path, text), [0, 1])
    assert plan.faults == (Fault(5.0, "kill", 1, 2.0), Fault(20.0, "meeting", None, 3.0))
    assert (plan.duration_s, plan.seed, plan.needs_hub) == (60.0, 0, False)


def test_a_seed_draws_the_same_faults_and_another_seed_others(tmp_path: Path) -> None:
    path = plan_file(tmp_path, "duration_s = 600\nseed = 5\n[random]\ncount = 30\nlasts_s = [1, 4]\n")
    plan = load_plan(path, [0, 1, 2])
    assert plan == load_plan(path, [0, 1, 2]) == load_plan(path, [2, 1, 0], seed=5)
    assert plan.faults != load_plan(path, [0, 1, 2], seed=6).faults
    assert len(plan.faults) == 30
    assert [f.at_s for f in plan.faults] == sorted(f.at_s for f in plan.faults)
    assert all(0 <= f.at_s < 600 and 1 <= f.lasts_s <= 4 for f in plan.faults)
    assert all((f.island is None) == (f.kind == "meeting") for f in plan.faults)


def test_drawn_faults_are_of_every_kind_that_is_asked_for_and_befall_every_island() -> None:
    faults = draw(500, list(KINDS), (1.0, 2.0), [3, 5], 100.0, 1)  # type: ignore[arg-type]
    assert {f.kind for f in faults} == set(KINDS)
    assert {f.island for f in faults} == {None, 3, 5}
    # A Poisson process: each tenth of the time has its share, 50, within four standard deviations.
    tenths = [sum(1 for f in faults if i * 10 <= f.at_s < (i + 1) * 10) for i in range(10)]
    assert all(22 <= n <= 78 for n in tenths), tenths


@pytest.mark.parametrize("kind", ["cut", "slow"])
def test_a_cut_needs_a_hub(tmp_path: Path, kind: str) -> None:
    text = f'duration_s = 9\n[[faults]]\nat_s = 1\nkind = "{kind}"\nisland = 0\n'
    assert load_plan(plan_file(tmp_path, text), [0]).needs_hub


WRONG = [
    ("duration_s = ", "is no TOML"),
    ("seed = 3", "duration_s is missing"),
    ("duration_s = -1", "duration_s = -1: give a number above 0"),
    ("duration_s = true", "duration_s = True"),
    ("duration_s = 9\nseed = 1.5", "seed = 1.5: give a whole number"),
    ("duration_s = 9\nfault = 1", "fault is no key; there are duration_s, seed"),
    ("duration_s = 9\nfaults = 1", r"write \[\[faults\]\]"),
    ("duration_s = 9\nfaults = [1]", r"faults\[0\]. is no table"),
    ('duration_s = 9\n[[faults]]\nkind = "kill"\nisland = 0', r"faults\[0\].at_s = None"),
    ('duration_s = 9\n[[faults]]\nat_s = 9\nkind = "kill"\nisland = 0', r"from 0 to duration_s \(9\)"),
    (
        'duration_s = 9\n[[faults]]\nat_s = 1\nkind = "kil"\nisland = 0',
        "kind = 'kil': give one of kill, freeze",
    ),
    ('duration_s = 9\n[[faults]]\nat_s = 1\nkind = "kill"\nisland = 7', r"island = 7: give one of \[0, 1\]"),
    ('duration_s = 9\n[[faults]]\nat_s = 1\nkind = "kill"\nisland = true', "island = True"),
    ('duration_s = 9\n[[faults]]\nat_s = 1\nkind = "kill"', "island = None"),
    (
        'duration_s = 9\n[[faults]]\nat_s = 1\nkind = "meeting"\nisland = 0',
        "meeting is no island's; leave it out",
    ),
    (
        'duration_s = 9\n[[faults]]\nat_s = 1\nkind = "kill"\nisland = 0\nlasts_s = 0',
        r"lasts_s = 0: give a number",
    ),
    ('duration_s = 9\n[[faults]]\nat_s = 1\nwhen = 2\nkind = "kill"', r"faults\[0\].when is no key"),
    ("duration_s = 9\nrandom = 4", "random. is no table"),
    ("duration_s = 9\n[random]\ncount = 0", "random.count = 0: give a whole number from 1"),
    ("duration_s = 9\n[random]\ncount = 1\nkinds = []", r"random.kinds = \[\]"),
    ('duration_s = 9\n[random]\ncount = 1\nkinds = ["x"]', "random.kinds = 'x'"),
    ("duration_s = 9\n[random]\ncount = 1\nlasts_s = 3", r"random.lasts_s = 3: give \[shortest, longest\]"),
    ("duration_s = 9\n[random]\ncount = 1\nlasts_s = [3, 1]", r"random.lasts_s = \[3, 1\]"),
]


@pytest.mark.parametrize("text, what", WRONG)
def test_what_is_wrong_is_named_with_its_key(tmp_path: Path, text: str, what: str) -> None:
    path = plan_file(tmp_path, text)
    with pytest.raises(UserError, match=what) as refusal:
        load_plan(path, [0, 1])
    assert str(refusal.value).startswith(f"--plan {path}: ") and "\n" not in str(refusal.value).strip()


def test_a_plan_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be read: No such file"):
        load_plan(tmp_path / "none.toml", [0])
