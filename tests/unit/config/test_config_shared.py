"""The shipped configurations, and what the islands of a run must agree on."""

from pathlib import Path

import pytest

from tests.helpers.config_values import changed
from torchtitan_diloco.config.fields import keys, put
from torchtitan_diloco.config.load import agreement, load_config
from torchtitan_diloco.config.schema import RunConfig
from torchtitan_diloco.errors import UserError

REPO = Path(__file__).parents[3]


@pytest.mark.parametrize("file", sorted((REPO / "train_configs").glob("**/*.toml")), ids=lambda f: f.name)
def test_shipped_configurations_load_and_begin_with_their_command(file: Path) -> None:
    resolved = load_config(file)
    first = file.read_text().splitlines()[0]
    name = str(file.relative_to(REPO))
    assert first.startswith(("# torchtitan-diloco run ", "# torchrun "))
    assert name in first
    overrides = first.partition(name)[2].split()
    if first.startswith("# torchrun "):
        assert f"-m torchtitan_diloco.train --job.config_file {name}" in first
        load_config(file, overrides)
    assert resolved.config.training.steps > 0


def test_the_quickstart_is_the_one_promised() -> None:
    c = load_config(REPO / "train_configs" / "quickstart.toml").config
    assert (c.transport.kind, c.semi_sync.method, c.semi_sync.sync_every) == ("gloo", "diloco", 10)
    assert c.checkpoint.enable and c.training.mixed_precision_param == c.training.dtype == "float32"
    assert c.data.sources[0].prepare_from == "bundled:kjv"
    paths = [c.job.dump_folder, c.data.sources[0].path]
    assert not any(Path(p).is_absolute() for p in paths)
    assert "\n[training]\n" in (REPO / "train_configs" / "quickstart.toml").read_text()


def test_islands_agree_on_what_defines_the_run_and_not_on_what_is_local(tmp_path: Path) -> None:
    base = agreement(RunConfig())
    assert base["semi_sync.outer.lr"] == 0.7
    assert len(base["model.tokenizer"]) == 64
    shared = {
        "training.steps",
        "training.seq_len",
        "training.dtype",
        "model.name",
        "model.flavor",
        "model.vocab_size",
    }
    shared |= {k for k in keys() if k.startswith("semi_sync.")} | {
        "data.seed",
        "data.shards",
        "debug.seed",
        "transport.kind",
        "transport.streams",
    }
    for key in set(keys()) - {"model.hf_assets_path"}:
        config = RunConfig()
        put(config, key, changed(key))
        assert (agreement(config) != base) == (key in shared), key


def test_the_tokenizer_counts_by_content_not_by_folder(tmp_path: Path) -> None:
    bundled = REPO / "torchtitan_diloco" / "assets" / "bpe2048" / "tokenizer.json"
    (tmp_path / "tokenizer.json").write_bytes(bundled.read_bytes())
    config = RunConfig()
    config.model.hf_assets_path = str(tmp_path)
    assert agreement(config) == agreement(RunConfig())
    (tmp_path / "tokenizer.json").write_bytes(bundled.read_bytes() + b" ")
    assert agreement(config) != agreement(RunConfig())


@pytest.mark.parametrize("path", ["bundled:nothing", "no/such/folder", "."])
def test_a_missing_tokenizer_is_named_with_its_setting(
    path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config = RunConfig()
    config.model.hf_assets_path = path
    with pytest.raises(UserError, match=r"^model\.hf_assets_path: "):
        agreement(config)
