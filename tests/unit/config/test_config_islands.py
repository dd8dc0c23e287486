"""[[islands]] tables: each island has settings of its own, what must agree cannot differ, and everything says where from."""

from pathlib import Path
from typing import Any

import pytest
import tomli
import tomli_w
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.helpers.config_values import changed, toml_values
from tests.helpers.mistakes import problems
from torchtitan_diloco.cli.run import island_ranks, require_ranks
from torchtitan_diloco.cli.validate import main as validate
from torchtitan_diloco.config.agreement import agreement
from torchtitan_diloco.config.fields import get, keys, put
from torchtitan_diloco.config.islands import for_island
from torchtitan_diloco.config.load import ConfigError, Resolved, load_config, to_toml
from torchtitan_diloco.config.retired import MOVED
from torchtitan_diloco.config.schema import DataSource, IslandTable, RunConfig
from torchtitan_diloco.config.shared import OWN_KEY, why_shared
from torchtitan_diloco.errors import UserError

TWO = """\
[training]
local_batch_size = 8
steps = 100

[[data.sources]]
path = "shared"

[[islands]]
id = 0
name = "leonardo"
site = "cineca"
nodes = 2
ranks = 4

[islands.training]
local_batch_size = 2

[islands.parallelism]
tensor_parallel_degree = 2

[[islands.data.sources]]
path = "own"

[[islands]]
id = 1
model.hf_assets_path = "elsewhere"
checkpoint.initial_load_path = "none"
"""


def load(tmp_path: Path, text: str, *overrides: str) -> Resolved:
    file = tmp_path / "run.toml"
    file.write_text(text)
    return load_config(file, overrides)


def test_the_run_as_a_whole_knows_its_islands_and_their_number(tmp_path: Path) -> None:
    resolved = load(tmp_path, TWO)
    c = resolved.config
    assert (c.semi_sync.num_islands, c.training.local_batch_size, c.data.sources[0].path) == (2, 8, "shared")
    assert resolved.origins["semi_sync.num_islands"] == f"{tmp_path}/run.toml:8"
    first, second = c.islands
    assert (first.id, first.name, first.site, first.nodes, first.ranks) == (0, "leonardo", "cineca", 2, 4)
    assert first.settings == {
        "training.local_batch_size": 2,
        "parallelism.tensor_parallel_degree": 2,
        "data.sources": [DataSource(path="own")],
    }
    assert second.settings == {"model.hf_assets_path": "elsewhere", "checkpoint.initial_load_path": None}
    assert resolved.origins["islands[0].training.local_batch_size"] == f"{tmp_path}/run.toml:16"


def test_the_command_line_picks_an_island_and_its_settings_win_over_the_file(tmp_path: Path) -> None:
    resolved = load(tmp_path, TWO, "--island.id", "0")
    c, file = resolved.config, tmp_path / "run.toml"
    assert (c.island.id, c.island.name, c.training.local_batch_size) == (0, "leonardo", 2)
    assert (c.training.steps, c.data.sources) == (100, [DataSource(path="own")])
    wanted = {
        "training.local_batch_size": f"{file}:16",
        "training.steps": f"{file}:3",
        "island.id": "command line",
        "island.name": f"{file}:10",
        "data.sources[0].path": f"{file}:22",
        "data.sources[0].weight": f"{file}:21",
    }
    assert {key: resolved.origins[key] for key in wanted} == wanted
    other = load(tmp_path, TWO, "--island.id", "1").config
    assert (other.island.id, other.training.local_batch_size, other.model.hf_assets_path) == (
        1,
        8,
        "elsewhere",
    )


def test_the_command_line_wins_over_the_island_and_says_so(tmp_path: Path) -> None:
    argv = ["--training.local_batch_size", "16"]
    resolved = load(tmp_path, TWO, "--island.id", "0", *argv)
    assert resolved.config.training.local_batch_size == 16
    assert resolved.origins["training.local_batch_size"] == "command line"
    run = load(tmp_path, TWO, *argv)
    assert any("wins over the [[islands]] tables of island 0" in note for note in run.notes)
    again = tmp_path / "again.toml"
    again.write_text(to_toml(run.config))
    assert load_config(again, ["--island.id", "0"]).config.training.local_batch_size == 16


@pytest.mark.parametrize("island", [None, 0, 1])
def test_a_resolved_file_with_islands_resolves_to_itself(island: int | None, tmp_path: Path) -> None:
    argv = [] if island is None else ["--island.id", str(island)]
    first = load(tmp_path, "[job]\nbase = 'qwen3.qwen3_0_6b'\n" + TWO, *argv).config
    again = tmp_path / "again" / "run.toml"
    again.parent.mkdir()
    again.write_text(to_toml(first))
    assert load_config(again, argv).config == first


def test_an_island_of_the_run_is_what_the_command_line_picks(tmp_path: Path) -> None:
    run = load(tmp_path, TWO).config
    for number in (0, 1):
        assert for_island(run, number) == load(tmp_path, TWO, "--island.id", str(number)).config


def test_a_trainer_must_say_which_island_it_is(tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match=r"island\.id: .* say which one this is: --island\.id N \(there are 0, 1\)"
    ):
        load(tmp_path, TWO).one_island()
    assert load(tmp_path, TWO, "--island.id", "1").one_island().config.island.id == 1
    assert load(tmp_path, "").one_island().config.island.id == 0


WRONG = {
    "an id twice": (
        "[[islands]]\nid = 0\n[[islands]]\nid = 0",
        "FILE:4: islands[1].id: (0) is already that of islands[0]; give each island its own",
    ),
    "a name twice": (
        "[[islands]]\nid = 0\nname = 'a'\n[[islands]]\nid = 1\nname = 'a'",
        'FILE:6: islands[1].name: ("a") is already that of islands[0]',
    ),
    "no id": ("[[islands]]\nname = 'a'", "FILE:1: islands[0].id: is missing"),
    "an id beyond the tables": (
        "[[islands]]\nid = 7",
        "FILE:2: islands[0].id: (7) must be below the number of [[islands]] tables (1): ids count from 0",
    ),
    "a negative id": ("[[islands]]\nid = -1", "FILE:2: islands[0].id: must be at least 0, got -1"),
    "no ranks": ("[[islands]]\nid = 0\nranks = 0", "FILE:3: islands[0].ranks: must be at least 1, got 0"),
    "a typo in the table": (
        "[[islands]]\nid = 0\nrank = 1",
        "FILE:3: islands[0].rank: unknown key; did you mean islands[0].ranks?",
    ),
    "another typo": (
        "[[islands]]\nid = 0\nnode = 1",
        "FILE:3: islands[0].node: unknown key; did you mean islands[0].nodes?",
    ),
    "letters the other way round": (
        "[[islands]]\nid = 0\nnmae = 'x'",
        "FILE:3: islands[0].nmae: unknown key; did you mean islands[0].name?",
    ),
    "a setting of a section": (
        "[[islands]]\nid = 0\nsync_every = 3",
        "FILE:3: islands[0].sync_every: unknown key; did you mean semi_sync.sync_every?",
    ),
    "a typo in a setting": (
        "[[islands]]\nid = 0\n[islands.training]\nlocal_batch_sice = 1",
        "FILE:4: islands[0].training.local_batch_sice: unknown key; did you mean training.local_batch_size?",
    ),
    "a wrong type": (
        "[[islands]]\nid = 0\n[islands.compile]\nenable = 1",
        "FILE:4: islands[0].compile.enable: must be true or false, got an integer (1)",
    ),
    "a range": (
        "[[islands]]\nid = 0\n[islands.training]\nlocal_batch_size = 0",
        "FILE:4: training.local_batch_size: must be at least 1, got 0",
    ),
    "another number of islands": (
        "[semi_sync]\nnum_islands = 3\n[[islands]]\nid = 0",
        "FILE:2: semi_sync.num_islands: (3) is not the number of [[islands]] tables (1); leave it out",
    ),
    "an id in the file": (
        "[island]\nid = 0\n[[islands]]\nid = 0",
        "FILE:2: island.id: with [[islands]] the command line says which island this is",
    ),
    "a table for the array": (
        "[islands]\nid = 0",
        "FILE:1: islands: must be an array of tables, written [[islands]]",
    ),
    "a value among the tables": ("islands = [3]", "FILE:1: islands[0]: must be a table, written [[islands]]"),
    "fewer steps than fragments": (
        "[semi_sync]\nfragments = 4\n[[islands]]\nid = 0\nsemi_sync.sync_every = 3",
        "FILE:5: islands[0].semi_sync.sync_every: (3) must be at least the number of fragments, each of which is sent once "
        "in it: raise it or lower semi_sync.fragments",
    ),
    "an overlap as long as its steps": (
        "[semi_sync]\noverlap = 3\n[[islands]]\nid = 0\nsemi_sync.sync_every = 3",
        "FILE:5: islands[0].semi_sync.sync_every: (3) must be more than semi_sync.overlap (3): a fragment is applied "
        "before it is sent",
    ),
    "no steps": (
        "[[islands]]\nid = 0\nsemi_sync.sync_every = 0",
        "FILE:3: islands[0].semi_sync.sync_every: must be at least 1, got 0",
    ),
    "its steps under another name": (
        "[[islands]]\nid = 0\nisland.own_sync_every = 5",
        "FILE:3: islands[0].island.own_sync_every: cannot differ between islands: the [[islands]] table says it as "
        "semi_sync.sync_every",
    ),
    "another method": (
        "[[islands]]\nid = 0\nsemi_sync.method = 'none'",
        "FILE:3: islands[0].semi_sync.method: cannot differ between islands: islands must agree on what is sent when",
    ),
    "a sequence length of its own": (
        "[[islands]]\nid = 0\ntraining.seq_len = 5",
        "FILE:3: islands[0].training.seq_len: cannot differ between islands: corpora are packed to it",
    ),
    "degrees that do not fit its ranks": (
        "[[islands]]\nid = 0\nranks = 3\nparallelism.tensor_parallel_degree = 2",
        "FILE:4: parallelism.data_parallel_shard_degree: (-1) x replicate (1) x context (1) x tensor (2) x pipeline (1) "
        "is not the island's 3 ranks",
    ),
}


@pytest.mark.parametrize(("text", "expected"), WRONG.values(), ids=WRONG.keys())
def test_a_mistake_in_a_table_is_named_with_its_line(text: str, expected: str, tmp_path: Path) -> None:
    (found,) = problems(tmp_path, text)
    assert found.startswith(expected)


def test_tables_after_one_without_an_id_keep_their_numbers(tmp_path: Path) -> None:
    text = "[[islands]]\nranks = 1\n[[islands]]\nid = 1\nranks = 0\n[[islands]]\nid = 3\n"
    assert problems(tmp_path, text) == [
        "FILE:1: islands[0].id: is missing",
        "FILE:5: islands[1].ranks: must be at least 1, got 0",
        "FILE:7: islands[2].id: (3) must be below the number of [[islands]] tables (3): ids count from 0",
    ]


def test_a_rule_that_only_one_island_breaks_names_it(tmp_path: Path) -> None:
    text = "[training]\nglobal_batch_size = 8\nlocal_batch_size = 1\n[[islands]]\nid = 0\nranks = 8\n"
    text += "[[islands]]\nid = 1\nranks = 3\n"
    (found,) = problems(tmp_path, text)
    assert found.startswith("FILE:2: training.global_batch_size: (8) must be a multiple of")
    assert found.endswith("(island 1)")


def test_an_unknown_island_lists_those_there_are(tmp_path: Path) -> None:
    (found,) = problems(tmp_path, TWO, "--island.id", "5")
    assert found == "command line: island.id: no [[islands]] table has the id 5; there are 0, 1"


@pytest.mark.parametrize("key", sorted(set(keys()) - {"islands", "job.base"}))
def test_every_key_is_an_islands_own_or_refused_with_the_reason(key: str, tmp_path: Path) -> None:
    config = RunConfig()
    other = changed(key)
    put(config, key, other)
    table = IslandTable(id=0, settings={key: other})
    text = tomli_w.dumps({"islands": tomli.loads(to_toml(RunConfig(islands=[table])))["islands"]})
    reason, found = why_shared(key), attempt(tmp_path, text, "--island.id", "0")
    if reason:
        assert isinstance(found, list)
        assert any(f"islands[0].{key}: cannot differ between islands: {reason}" in p for p in found)
    elif isinstance(found, list):  # a rule between settings, which has its own test
        assert not [p for p in found if "cannot differ" in p or "unknown" in p]
    else:
        assert get(found.config, OWN_KEY.get(key, key)) == other


SOURCE = '[[data.sources]]\npath = "a"\n[[islands]]\nid = 0\n[[islands]]\nid = 1\n'


@pytest.mark.parametrize(
    ("more", "shared"),
    [
        ("", True),
        ('[[islands.data.sources]]\npath = "b"', False),
        ('[[islands.data.sources]]\npath = "a"\nweight = 3.0\npresent = "0-7"', True),
        ('[[islands.data.sources]]\npath = "a"\n[[islands.data.sources]]\npath = "b"', False),
    ],
    ids=["none of its own", "another path", "the same path", "one more"],
)
def test_islands_that_name_different_corpora_do_not_share_data(
    more: str, shared: bool, tmp_path: Path
) -> None:
    for island in ((), ("--island.id", "0"), ("--island.id", "1")):
        resolved = load(tmp_path, SOURCE + more, *island)
        assert resolved.config.data.shared is shared
        assert resolved.origins["data.shared"] == ("default" if shared else f"{tmp_path}/run.toml:7")
        said = [
            note
            for note in resolved.notes
            if note.startswith("data.shared is false, since the [[islands]] name")
        ]
        assert bool(said) is not shared
    for written in (True, False):
        value = str(written).lower()
        resolved = load(tmp_path, f"data.shared = {value}\n" + SOURCE + more)
        assert resolved.config.data.shared is written and not any("data.shared" in n for n in resolved.notes)
        assert load(tmp_path, SOURCE + more, "--data.shared", value).config.data.shared is written
    one = '[{"path": "c"}]'
    assert load(tmp_path, SOURCE + more, "--data.sources", one).config.data.shared, (
        "the command line says one for all"
    )


def test_the_sync_every_of_the_run_is_checked_where_all_islands_have_their_own(tmp_path: Path) -> None:
    text = "[semi_sync]\nsync_every = 3\nfragments = 4\n[[islands]]\nid = 0\nsemi_sync.sync_every = 8"
    (found,) = problems(tmp_path, text)
    assert found.startswith(
        "FILE:3: semi_sync.fragments: (4 fragments) must be at most semi_sync.sync_every (3)"
    )


def attempt(tmp_path: Path, text: str, *overrides: str) -> Resolved | list[str]:
    try:
        return load(tmp_path, text, *overrides)
    except ConfigError as e:
        return e.problems


def test_what_islands_are_compared_by_at_a_join_cannot_differ(tmp_path: Path) -> None:
    compared = set(agreement(RunConfig())) - {"model.tokenizer"}  # by content, since its folder may differ
    assert all(why_shared(key) for key in compared - OWN_KEY.keys())


def test_an_island_has_a_sync_every_of_its_own_beside_the_runs(tmp_path: Path) -> None:
    text = (
        "[semi_sync]\nsync_every = 10\n[[islands]]\nid = 0\n[[islands]]\nid = 1\nsemi_sync.sync_every = 5\n"
    )
    own, other = load(tmp_path, text, "--island.id", "1"), load(tmp_path, text, "--island.id", "0")
    assert (own.config.semi_sync.sync_every, own.config.island.own_sync_every) == (10, 5)
    assert (other.config.semi_sync.sync_every, other.config.island.own_sync_every) == (10, None)
    assert own.origins["island.own_sync_every"] == f"{tmp_path}/run.toml:7"
    assert agreement(own.config) == agreement(other.config), "they can train together"
    run = load(tmp_path, text).config
    assert run.islands[1].settings == {"semi_sync.sync_every": 5}
    for config in (own.config, run):
        again = tmp_path / "again" / "run.toml"
        again.parent.mkdir(exist_ok=True)
        again.write_text(to_toml(config))
        assert load_config(again, ["--island.id", "1"]).config == own.config
    for argv, wanted in (
        (["--semi_sync.sync_every", "7"], (7, None)),
        (["--island.own_sync_every", "7"], (10, 7)),
    ):
        c = load(tmp_path, text, "--island.id", "1", *argv).config
        assert (c.semi_sync.sync_every, c.island.own_sync_every) == wanted
        run = load(tmp_path, text, *argv).config
        assert (run.semi_sync.sync_every, for_island(run, 1).island.own_sync_every) == wanted


def test_run_takes_islands_and_ranks_from_the_tables(tmp_path: Path) -> None:
    config = load(tmp_path, TWO).config
    assert island_ranks(None, config) == {0: 8, 1: 1}
    assert island_ranks("2,4", config) == {0: 2, 1: 4}
    assert island_ranks("3", load(tmp_path, "[semi_sync]\nnum_islands = 2").config) == {0: 3, 1: 3}
    with pytest.raises(UserError, match="3 numbers for 2 islands"):
        island_ranks("1,2,3", config)
    with pytest.raises(UserError, match=r"island 0: parallelism.data_parallel_shard_degree: .*3 ranks"):
        require_ranks(for_island(config, 0), 3)


def test_validate_shows_what_differs_and_warns_of_absent_paths(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.toml").write_text(
        TWO + "[checkpoint]\ninitial_load_path = 'seed'\n[model]\nflavor = 'debugmodel'\n"
    )
    assert validate(["run.toml"]) == 0
    shown = capsys.readouterr().out
    assert "island 0 (leonardo): training.local_batch_size = 2 instead of 8  run.toml:16" in shown
    assert 'island 1: model.hf_assets_path = "elsewhere" instead of "bundled:bpe2048"' in shown
    for warning in (
        'model.hf_assets_path: folder "elsewhere" does not exist',
        'data.sources[0].path: folder "shared" does not exist',
        'data.sources[0].path: folder "own" does not exist',
        'checkpoint.initial_load_path: "seed" does not exist',
    ):
        assert shown.count(f"warning: {warning}") == 1
    assert validate(["run.toml", "--island.id", "0"]) == 0
    assert 'data.sources[0].path: folder "shared"' not in capsys.readouterr().out


def test_islands_on_the_command_line(tmp_path: Path) -> None:
    argv: Any = ["--islands", '[{"id": 0, "training": {"gc_freq": 7}}]']
    c = load(tmp_path, "", *argv, "--island.id", "0").config
    assert c.training.gc_freq == 7
    (found,) = problems(tmp_path, "", "--islands", '[{"id": 0, "training": {"gc_frec": 7}}]')
    assert found.startswith("command line: islands[0].training.gc_frec: unknown key")


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_any_change_to_the_tables_is_taken_or_named(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    document = tomli.loads(TWO)
    table = data.draw(st.sampled_from(document["islands"]), "table")
    node, path = table, []
    while data.draw(st.booleans(), "deeper") and any(isinstance(v, dict) for v in node.values()):
        path.append(
            data.draw(st.sampled_from([k for k, v in node.items() if isinstance(v, dict)]), "section")
        )
        node = node[path[-1]]
    names = [*node, "ids", "training", "compile", "islands", "semi_sync", "fault_tolerance", "sources"]
    name, value = data.draw(st.sampled_from(names), "name"), data.draw(toml_values, "value")
    node[name] = value
    found = attempt(tmp_path_factory.getbasetemp(), tomli_w.dumps(document), "--island.id", "0")
    if isinstance(found, list):
        assert found and all("\n" not in p for p in found)
        return
    own = next(t for t in found.config.islands if t.id == table["id"])
    key = ".".join([*path, name])
    if key in ("name", "site", "nodes", "ranks", "id"):
        assert getattr(own, key) == value or value == "none"
    elif not isinstance(value, dict | list):
        assert own.settings[MOVED[key].new if key in MOVED else key] == value or value == "none"
