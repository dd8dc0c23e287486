"""The functions of TorchTitan's registry say what the shipped files say, and what derives from a flag follows it."""

import pytest
from torchtitan.config import ConfigManager

from torchtitan_diloco import config_registry
from torchtitan_diloco.config.load import load_config
from torchtitan_diloco.trainer import DiLoCoTrainer


@pytest.fixture
def parse(tmp_path, monkeypatch):
    """The configuration that TorchTitan's flags give, with the bundled text prepared once."""
    monkeypatch.chdir(tmp_path)
    return lambda *flags: ConfigManager().parse_args(["--module", "torchtitan_diloco", *flags])


def test_the_registry_holds_every_shipped_file():
    shipped = {path.stem for path in config_registry.CONFIGS.glob("*.toml")}
    train_configs = {
        path.stem for path in (config_registry.CONFIGS.parents[2] / "train_configs").glob("*.toml")
    }
    assert shipped == train_configs == {"quickstart", "llama3_8b"}
    assert all(callable(getattr(config_registry, name)) for name in shipped)


def test_flags_apply_on_top_of_the_shipped_file_and_what_derives_from_them_follows(parse):
    flags = {
        "--island.id": "2",
        "--semi_sync.num_islands": "3",
        "--semi_sync.sync_every": "7",
        "--training.steps": "9",
    }
    config = parse("--config", "quickstart", *[word for flag in flags.items() for word in flag])
    shipped = load_config(config_registry.CONFIGS / "quickstart.toml").config
    assert isinstance(config, DiLoCoTrainer.Config)
    assert config.training.seq_len == shipped.training.seq_len
    assert config.semi_sync.outer == shipped.semi_sync.outer
    assert (config.dataloader.island_id, config.dataloader.num_islands) == (2, 3)
    assert config.dump_folder.endswith("/quickstart/island-2")
    assert config.agreement["semi_sync.sync_every"] == 7
    assert config.agreement["training.steps"] == 9
    assert config.agreement["training.seq_len"] == shipped.training.seq_len
    assert len(config.agreement["model.tokenizer"]) == 64
    assert config.build.__self__._owner is DiLoCoTrainer


def test_what_is_missing_is_said_in_one_sentence(parse, capsys):
    with pytest.raises(SystemExit) as stopped:
        parse("--config", "llama3_8b")
    assert stopped.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ") and "assets/hf/Llama-3.1-8B" in line
