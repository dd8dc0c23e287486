"""What a valid configuration loads to and where its values come from."""

import dataclasses
from pathlib import Path

import pytest

from torchtitan_diloco.config.fields import get, items, keys, kinds, sections
from torchtitan_diloco.config.load import Resolved, load_config, take_config_file
from torchtitan_diloco.config.rules import RANGES, broken_ranges, broken_relations
from torchtitan_diloco.config.schema import DataSource, RunConfig
from torchtitan_diloco.errors import UserError


def load(tmp_path: Path, text: str, *overrides: str, name: str = "run.toml") -> Resolved:
    file = tmp_path / name
    file.write_text(text, encoding="utf-8", newline="")
    return load_config(file, overrides)


def test_the_defaults_break_no_rule() -> None:
    assert list(broken_ranges(RunConfig())) == []
    assert list(broken_relations(RunConfig())) == []


def test_only_optional_keys_may_be_absent_and_absence_is_their_default() -> None:
    """TOML has no null: a key left out must mean None, or a written configuration would load differently."""
    for key, kind in keys().items():
        assert kind.optional == (get(RunConfig(), key) is None), key


def test_every_range_is_about_a_key_and_every_number_has_a_range() -> None:
    assert set(RANGES) <= set(keys())
    assert {k for k, kind in keys().items() if kind.base in ("int", "float")} <= set(RANGES)


def test_the_contracted_sections_are_there() -> None:
    ours = {
        "data.seed": 0,
        "data.shards": 64,
        "data.shared": True,
        "data.sources": [],
        "island.id": 0,
        "island.name": "",
        "island.advertise": "",
        "island.port": 0,
        "island.own_sync_every": None,
        "lighthouse.address": "",
        "lighthouse.heartbeat_interval_s": 0.5,
        "lighthouse.heartbeat_timeout_s": 5.0,
        "lighthouse.join_timeout_s": 1.0,
        "lighthouse.quorum_interval_s": 0.2,
        "lighthouse.patience_s": 600.0,
        "transport.kind": "gloo",
        "transport.exchange_timeout_s": 90.0,
        "transport.max_rate": 0.0,
        "transport.streams": None,
        "transport.urls": [],
        "transport.ca_file": "",
        "transport.token_file": "",
        "transport.dir": "",
        "syncer.bind": "127.0.0.1:29520",
        "syncer.cert": "",
        "syncer.key": "",
        "syncer.tokens": "",
        "syncer.dir": "",
        "syncer.save_every": 1,
        "syncer.heartbeat_timeout_s": 5.0,
        "syncer.hang_timeout_s": 600.0,
        "syncer.wait_s": None,
        "syncer.spools": [],
        "syncer.spool_timeout_s": 86400.0,
        "syncer.workers": 0,
        "syncer.worker_port": 0,
        "syncer.worker_urls": [],
        "syncer.worker_secret": "",
        "semi_sync.method": "diloco",
        "semi_sync.sync_every": 100,
        "semi_sync.fragments": 1,
        "semi_sync.fragment_by": "tensor",
        "semi_sync.module_fqns_per_fragment": None,
        "semi_sync.overlap": 0,
        "semi_sync.mix_alpha": 0.0,
        "semi_sync.codec.wire": "fp32",
        "semi_sync.codec.error_feedback": False,
        "semi_sync.codec.rounding": "nearest",
        "semi_sync.codec.block": None,
        "semi_sync.codec.density": None,
        "semi_sync.max_failed_slots": 32,
        "semi_sync.num_islands": 1,
        "semi_sync.found": "wait_all",
        "semi_sync.outer.name": "sgd",
        "semi_sync.outer.lr": 0.7,
        "semi_sync.outer.momentum": 0.9,
        "semi_sync.outer.nesterov": True,
        "semi_sync.outer.schedule": "constant",
        "semi_sync.outer.min_lr_factor": 0.1,
        "semi_sync.merge.method": "mean",
        "semi_sync.merge.weight": "tokens",
        "debug.pace_step_seconds": 0.0,
        "debug.dump_sends": False,
        "debug.inject_faults": False,
        "checkpoint.last_save_model_only": False,
    }
    assert {k: get(RunConfig(), k) for k in ours} == ours
    own = ("data.", "island.", "lighthouse.", "transport.", "semi_sync.")
    assert {k for k in keys() if k.startswith(own)} == {k for k in ours if k.startswith(own)}


def test_dataclass_fields_all_have_kinds() -> None:
    for table in {RunConfig, *sections().values(), DataSource}:
        assert set(kinds(table)) == {f.name for f in dataclasses.fields(table)}


def test_an_empty_file_is_all_defaults_and_is_named_after_the_file(tmp_path: Path) -> None:
    resolved = load(tmp_path, "", name="my-run.toml")
    expected = RunConfig()
    expected.job.name = "my-run"
    assert resolved.config == expected
    assert set(resolved.origins) >= set(keys())
    assert set(resolved.origins.values()) == {"default"}


def test_each_value_knows_its_origin(tmp_path: Path) -> None:
    text = "# c\n[training]\nsteps = 12\nlocal_batch_size = 2\n\n[semi_sync]\nouter.lr = 1\n"
    text += "[[data.sources]]\npath = 'a'\n"
    resolved = load(tmp_path, text, "--training.steps", "7", "--checkpoint.enable")
    file = tmp_path / "run.toml"
    wanted = {
        "training.steps": "command line",
        "training.local_batch_size": f"{file}:4",
        "semi_sync.outer.lr": f"{file}:7",
        "semi_sync.outer.momentum": "default",
        "data.sources": f"{file}:8",
        "data.sources[0].path": f"{file}:9",
        "data.sources[0].weight": f"{file}:8",
        "checkpoint.enable": "command line",
        "optimizer.lr": "default",
    }
    assert {k: resolved.origins[k] for k in wanted} == wanted
    assert {key for key, _ in items(resolved.config)} <= set(resolved.origins)


def test_an_integer_will_do_for_a_number(tmp_path: Path) -> None:
    lr = load(tmp_path, "[optimizer]\nlr = 1").config.optimizer.lr
    assert (lr, type(lr)) == (1.0, float)


@pytest.mark.parametrize("method", ["diloco", "sync"])
def test_an_empty_list_of_fragments_is_none_at_all(tmp_path: Path, method: str) -> None:
    """v0.2's default; rules, islands that compare settings and the partition must see one thing."""
    text = f'[semi_sync]\nmethod = "{method}"\nmodule_fqns_per_fragment = []'
    assert load(tmp_path, text).config.semi_sync.module_fqns_per_fragment is None
    config = RunConfig()
    config.semi_sync.fragments, config.semi_sync.module_fqns_per_fragment = 200, []
    assert [involved[0] for involved, _ in broken_relations(config)] == ["semi_sync.fragments"]


def test_windows_line_ends_and_byte_order_mark(tmp_path: Path) -> None:
    file = tmp_path / "w.toml"
    file.write_bytes(b"\xef\xbb\xbf[training]\r\n\r\nsteps = 5\r\n")
    resolved = load_config(file)
    assert resolved.config.training.steps == 5
    assert resolved.origins["training.steps"] == f"{file}:3"


@pytest.mark.parametrize(
    ("argv", "key", "expected"),
    [
        (["--training.steps", "7"], "training.steps", 7),
        (["--training.steps=7", "--training.steps=1_000"], "training.steps", 1000),
        (["--training.local-batch-size", "3"], "training.local_batch_size", 3),
        (["--checkpoint.load_step", "-1"], "checkpoint.load_step", -1),
        (["--optimizer.lr", "3e-4"], "optimizer.lr", 3e-4),
        (["--optimizer.lr=1"], "optimizer.lr", 1.0),
        (["--debug.deterministic"], "debug.deterministic", True),
        (["--debug.deterministic", "--training.steps", "3"], "debug.deterministic", True),
        (["--semi_sync.outer.nesterov", "false"], "semi_sync.outer.nesterov", False),
        (["--semi_sync.outer.nesterov=False"], "semi_sync.outer.nesterov", False),
        (["--no-semi_sync.outer.nesterov"], "semi_sync.outer.nesterov", False),
        (["--semi_sync.outer.no-nesterov"], "semi_sync.outer.nesterov", False),
        (["--checkpoint.no_initial_load_model_only"], "checkpoint.initial_load_model_only", False),
        (["--debug.seed", "None"], "debug.seed", None),
        (["--compile.components", "model, loss"], "compile.components", ["model", "loss"]),
        (["--checkpoint.exclude_from_loading", '["a,b"]'], "checkpoint.exclude_from_loading", ["a,b"]),
        (["--compile.components="], "compile.components", []),
        (
            ["--parallelism.module_fqns_per_model_part", '[["a"], []]'],
            "parallelism.module_fqns_per_model_part",
            [["a"], []],
        ),
        (
            ["--data.sources", '[{"path": "a", "weight": 2}]'],
            "data.sources",
            [DataSource(path="a", weight=2.0)],
        ),
        (
            ["--model.converters", "quantize.linear.float8, quantize.grouped_mm.mx"],
            "model.converters",
            ["quantize.linear.float8", "quantize.grouped_mm.mx"],
        ),
        (["--model.converters="], "model.converters", []),
        (["--job.description=--x"], "job.description", "--x"),
        (["--job.description", ""], "job.description", ""),
    ],
)
def test_command_line_forms(tmp_path: Path, argv: list[str], key: str, expected: object) -> None:
    text = "[training]\nsteps = 3\n[debug]\nseed = 5\n[[data.sources]]\npath = 'z'\n[[data.sources]]\npath = 'y'\n"
    resolved = load(tmp_path, text, *argv)
    found = get(resolved.config, key)
    assert found == expected
    assert type(found) is type(expected)
    assert resolved.origins[key] == "command line"


def test_sources_of_the_command_line_replace_those_of_the_file(tmp_path: Path) -> None:
    resolved = load(tmp_path, "[[data.sources]]\npath = 'z'\nweight = 3", "--data.sources", '[{"path": "a"}]')
    assert resolved.origins["data.sources[0].path"] == "command line"
    assert resolved.origins["data.sources[0].weight"] == "command line"


def test_a_trainer_takes_its_file_from_the_command_line() -> None:
    argv = ["--training.steps", "3", "--job.config_file", "a.toml", "--debug.deterministic"]
    assert take_config_file(argv) == ("a.toml", ["--training.steps", "3", "--debug.deterministic"])
    assert take_config_file(["--job.config-file=b.toml"]) == ("b.toml", [])
    for wrong in ([], ["--job.config_file"], ["--job.config_file=a", "--job.config_file=b"]):
        with pytest.raises(UserError, match=r"--job\.config_file"):
            take_config_file(wrong)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", 'activation_checkpoint.mode = "selective"'),
        ("[training]\nsteps = 50", "lr_scheduler.warmup_steps (200) leaves none of 50 steps"),
        (
            "[semi_sync]\nsync_every = 99999",
            "semi_sync.sync_every (99999) is more than training.steps (10000): the islands exchange only once, at the last",
        ),
        ("[training]\ndataset = 'c4'\n[[data.sources]]\npath = 'x'", "training.dataset: not used, because"),
        (
            "[training.dataloader]\nnum_workers = 1\nprefetch_factor = 2\n[[data.sources]]\npath = 'x'",
            "training.dataloader.num_workers and training.dataloader.prefetch_factor: not used, because",
        ),
        ("", "checkpoint.enable = false"),
        (
            "[checkpoint]\nenable = true\nlast_save_model_only = true",
            "a finished run cannot be continued from its last checkpoint",
        ),
        ("", 'training.dataset = "c4_test" is read by TorchTitan\'s own loader, which keeps no ledger'),
        ('[semi_sync]\nmethod = "none"\nnum_islands = 2', "the 2 islands train on their own"),
    ],
)
def test_notes_say_what_one_might_not_expect(tmp_path: Path, text: str, expected: str) -> None:
    assert [n for n in load(tmp_path, text).notes if expected in n]


def test_each_setting_that_has_no_effect_without_an_exchange_is_named(tmp_path: Path) -> None:
    text = '[semi_sync]\nmethod = "none"\nnum_islands = 1\nfragments = 4\noverlap = 2\n[semi_sync.codec]\nwire = "int8"'
    said = [
        note.partition(":")[0] for note in load(tmp_path, text).notes if "which exchanges nothing" in note
    ]
    assert said == ["semi_sync.fragments", "semi_sync.overlap", "semi_sync.codec.wire"]
    text = text.replace('"none"', '"diloco"')
    assert not [note for note in load(tmp_path, text).notes if "which exchanges nothing" in note]
