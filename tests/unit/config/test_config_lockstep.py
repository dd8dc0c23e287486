"""What the configuration says of ``semi_sync.method = "sync"``: settings without a meaning, islands that are not alike."""

from pathlib import Path

import pytest

from tests.helpers.config_values import changed
from tests.helpers.mistakes import problems
from torchtitan_diloco.cli import run
from torchtitan_diloco.config.agreement import agreement, lockstep_agreement
from torchtitan_diloco.config.fields import get, keys, put
from torchtitan_diloco.config.load import load_config
from torchtitan_diloco.config.rules import broken_relations
from torchtitan_diloco.config.schema import RunConfig
from torchtitan_diloco.config.timeouts import timeouts
from torchtitan_diloco.errors import UserError

REPO = Path(__file__).parents[3]
QUICKSTART = REPO / "train_configs" / "quickstart.toml"
MEANINGLESS = {k for k in keys() if k.startswith(("semi_sync.codec.", "semi_sync.fragment"))}
MEANINGLESS |= {"semi_sync.module_fqns_per_fragment", "semi_sync.overlap", "semi_sync.mix_alpha"}
MEANINGLESS |= {"transport.kind", "transport.max_rate", "transport.streams", "debug.dump_sends"}


@pytest.mark.parametrize("key", sorted(MEANINGLESS))
def test_a_setting_without_a_meaning_is_refused_by_name(key: str) -> None:
    config = RunConfig()
    config.semi_sync.method = "sync"
    assert list(broken_relations(config)) == []
    put(config, key, [["layers"]] if key.endswith("fqns_per_fragment") else changed(key))
    ((blamed, *_), message), *others = broken_relations(config)
    assert blamed == key and others == []
    assert message.endswith(
        'cannot be had with semi_sync.method = "sync", which averages gradients in every step; remove it'
    )


def test_the_refusal_says_where_the_setting_is_written(tmp_path: Path) -> None:
    assert problems(tmp_path, '[semi_sync]\nmethod = "sync"\noverlap = 2\n') == [
        'FILE:3: semi_sync.overlap: (2) cannot be had with semi_sync.method = "sync", which averages gradients in every '
        "step; remove it"
    ]


def test_fr_07_a_silence_that_outlasts_an_exchange_is_refused_and_the_time_outs_are_told(
    tmp_path: Path,
) -> None:
    (found,) = problems(tmp_path, "[lighthouse]\nheartbeat_timeout_s = 90\n[semi_sync]\nnum_islands = 2\n")
    assert found.startswith(
        "FILE:2: lighthouse.heartbeat_timeout_s: (90 s) must be less than transport.exchange_timeout_s (90 s)"
    )
    config = RunConfig()
    told = list(timeouts(config))
    assert (
        told[0]
        == "lighthouse.heartbeat_timeout_s = 5 s: silence of an island until the others go on without it"
    )
    assert not any("syncer" in line for line in told)
    config.transport.kind = "hub"
    assert "syncer.wait_s = 3600 s or two measured windows: a slot's wait for islands that live" in timeouts(
        config
    )
    config.semi_sync.method = "none"
    assert list(timeouts(config)) == []


@pytest.mark.parametrize(("key", "other"), [("train", "init"), ("init", "train")])
def test_fr_08_a_time_out_of_the_exchange_that_is_not_below_those_inside_the_island_is_refused(
    tmp_path: Path, key: str, other: str
) -> None:
    text = (
        f'[semi_sync]\nmethod = "sync"\n[comm]\n{key}_timeout_seconds = 90\n{other}_timeout_seconds = 500\n'
    )
    (found,) = problems(tmp_path, text)
    assert found.startswith(
        f"FILE:4: transport.exchange_timeout_s: (90 s) must be less than comm.{key}_timeout_seconds (90 s)"
    )
    file = tmp_path / "run.toml"
    assert load_config(file, ["--transport.exchange_timeout_s", "89"])
    # With the other methods no rank waits for islands in a collective of the model.
    assert load_config(file, ["--semi_sync.method", "diloco", "--transport.exchange_timeout_s", "1800"])


def test_the_quickstart_trains_with_it_and_says_what_is_not_used() -> None:
    resolved = load_config(QUICKSTART, ["--semi_sync.method", "sync", "--semi_sync.num_islands", "2"])
    assert any("[semi_sync.outer] is not used" in note for note in resolved.notes)


def test_settings_that_make_the_optimizer_step_or_the_shards_must_agree_too() -> None:
    base = lockstep_agreement(RunConfig())
    assert base.keys() >= {"optimizer.lr", "training.max_norm", "parallelism.tensor_parallel_degree"}
    assert not base.keys() & agreement(RunConfig()).keys()
    for key in set(keys()) - {"model.hf_assets_path"}:
        config = RunConfig()
        put(config, key, changed(key))
        if get(config, key) == get(RunConfig(), key):
            continue  # it has one value only
        assert (lockstep_agreement(config) != base) == (key in base), key


TABLES = """
[semi_sync]
method = "{method}"
[[islands]]
id = 0
ranks = {ranks}
[[islands]]
id = 1
ranks = 2
[islands.optimizer]
lr = {lr}
"""


def test_islands_of_a_file_must_be_alike(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    for method, ranks, lr in (("sync", 2, 8e-4), ("diloco", 1, 0.5)):
        file.write_text(TABLES.format(method=method, ranks=ranks, lr=lr))
        assert load_config(file).config.semi_sync.num_islands == 2
    assert problems(tmp_path, TABLES.format(method="sync", ranks=1, lr=0.5)) == [
        "FILE:7: islands.ranks: (2 on island 1, 1 on island 0) must be the same on all islands with "
        'semi_sync.method = "sync"',
        "FILE:11: optimizer.lr: (0.5 on island 1, 0.0008 on island 0) must be the same on all islands with "
        'semi_sync.method = "sync"',
    ]


def test_run_refuses_islands_of_different_size() -> None:
    argv = [str(QUICKSTART), "--islands", "2", "--ranks", "2,1", "--semi_sync.method", "sync"]
    with pytest.raises(UserError, match=r"^--ranks 2,1: all islands need the same number of processes with"):
        run.main(argv)
