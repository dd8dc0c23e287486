"""`job.base` starts from TorchTitan's own config functions, and gives their configuration where nothing is overridden."""

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.light_cli import validate
from torchtitan_diloco import cpu

cpu.install()

from torchtitan.trainer import Trainer  # noqa: E402

from torchtitan_diloco.config import upstream, upstream_names  # noqa: E402
from torchtitan_diloco.config.load import ConfigError, load_config, to_toml  # noqa: E402
from torchtitan_diloco.config.translate import trainer_config  # noqa: E402
from torchtitan_diloco.config.upstream import bases  # noqa: E402
from torchtitan_diloco.config.upstream_names import TEXT_MODELS  # noqa: E402
from torchtitan_diloco.config.upstream_table import (  # noqa: E402
    base_config,
    make_table,
    without_hardware,
)
from torchtitan_diloco.errors import UserError  # noqa: E402

REPLACED = {"dataloader", "checkpoint", "metrics", "dump_folder"}
"""What a run of ours has of its own: loader, checkpointer, metrics, and the island's folder."""


def test_the_table_is_what_the_installed_torchtitan_says() -> None:
    """If this fails: python -m torchtitan_diloco.config.upstream_table"""
    assert json.loads(upstream.TABLE.read_text()) == json.loads(json.dumps(make_table()))


def test_the_names_that_validate_knows_are_those_that_torchtitan_and_torch_take() -> None:
    from torch.distributed.pipelining.schedules import get_schedule_class
    from torchtitan.hf_datasets.text_datasets import DATASETS

    assert set(upstream_names.DATASETS) == set(DATASETS)
    with pytest.raises(ValueError, match=re.escape(str(list(upstream_names.PIPELINE_SCHEDULES)))):
        get_schedule_class("none of them")


def described(value: Any) -> str:
    """A configuration as text, classes included, without addresses of functions and objects."""
    if dataclasses.is_dataclass(value):
        inner = ", ".join(
            f"{f.name}={described(getattr(value, f.name, None))}" for f in dataclasses.fields(value)
        )
        return f"{type(value).__qualname__}({inner})"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{k!r}: {described(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(described, value))}]"
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value))


def loaded(tmp_path: Path, base: str, rest: str = "", *overrides: str) -> Any:
    file = tmp_path / "run.toml"
    file.write_text(f'[job]\nbase = "{base}"\n{rest}')
    return load_config(file, overrides)


@pytest.fixture
def assets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every tokenizer that the functions name, since a start refuses one that is not there."""
    monkeypatch.chdir(tmp_path)
    table = json.loads(upstream.TABLE.read_text())["bases"]
    for folder in {values["model.hf_assets_path"] for values in table.values()}:
        Path(folder).mkdir(parents=True)
        (Path(folder) / "tokenizer.json").write_text("{}")


@pytest.mark.usefixtures("assets")
@pytest.mark.parametrize("base", bases())
def test_the_configuration_of_a_base_is_torchtitans_own(base: str, tmp_path: Path) -> None:
    """For every text function. Where torchao or the accelerator is missing, both sides go without the conversion."""
    resolved = loaded(tmp_path, base)
    with without_hardware():
        theirs = base_config(base)
        ours = trainer_config(Trainer.Config, resolved.config)
    for f in dataclasses.fields(Trainer.Config):
        a, b = getattr(ours, f.name), getattr(theirs, f.name)
        if f.name == "hf_assets_path":
            a, b = Path(a), Path(b)
        if f.name not in REPLACED:
            assert described(a) == described(b), f.name
    kept = {"initial_load_model_only"}  # TorchTitan warns of its default where nothing is loaded
    for name in ("checkpoint", "metrics"):
        a, b = getattr(ours, name), getattr(theirs, name)
        for f in dataclasses.fields(type(b)):
            assert f.name in kept or getattr(a, f.name) == getattr(b, f.name), f"{name}.{f.name}"


def test_every_text_model_has_bases() -> None:
    assert {name.partition(".")[0] for name in bases()} == set(TEXT_MODELS)
    assert len(bases()) > 40
    with without_hardware():
        assert described(base_config("llama3.llama3_8b")) != described(base_config("llama3.llama3_8b_mxfp8"))


def test_the_file_and_the_command_line_win_over_the_base_and_origins_say_so(tmp_path: Path) -> None:
    resolved = loaded(
        tmp_path, "llama3.llama3_8b", "[training]\nsteps = 7\n", "--training.local_batch_size", "3"
    )
    c, origins = resolved.config, resolved.origins
    assert (c.training.steps, c.training.local_batch_size, c.training.seq_len) == (7, 3, 8192)
    assert (c.model.flavor, c.optimizer.lr, c.profiling.profile_freq) == ("8B", 3e-4, 100)
    assert origins["training.steps"].endswith(":4") and origins["training.local_batch_size"] == "command line"
    assert origins["training.seq_len"] == origins["training.gc_freq"] == "base llama3.llama3_8b"
    assert origins["semi_sync.sync_every"] == "default"


@pytest.mark.parametrize(
    "base", ["llama3.llama3_405b", "deepseek_v3.deepseek_v3_16b", "gpt_oss.gpt_oss_debugmodel"]
)
def test_a_resolved_file_with_a_base_resolves_to_itself(base: str, tmp_path: Path) -> None:
    first = loaded(tmp_path, base, "", "--lr_scheduler.decay_ratio", "none")
    assert first.config.lr_scheduler.decay_ratio is None
    again = tmp_path / "again" / "run.toml"
    again.parent.mkdir()
    again.write_text(to_toml(first.config))
    assert load_config(again).config == first.config


def test_an_unknown_base_lists_what_exists(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        loaded(tmp_path, "llama3.llama3_8", "[training]\nstep = 1\n")
    base, step = caught.value.problems
    assert base.startswith(f"{tmp_path}/run.toml:2: job.base: TorchTitan has no config function")
    assert "did you mean llama3.llama3_8b?" in base and "gpt_oss.gpt_oss_120b" in base
    assert "training.step" in step


@pytest.mark.usefixtures("assets")
def test_another_flavor_takes_the_rest_of_the_base_and_says_so(tmp_path: Path) -> None:
    resolved = loaded(tmp_path, "llama3.llama3_8b", '[model]\nflavor = "1B"\n')
    assert [n for n in resolved.notes if "is of another model (see model.flavor)" in n]
    c = trainer_config(Trainer.Config, resolved.config)
    assert (c.model_spec.flavor, c.training.seq_len) == ("1B", 8192)


@pytest.mark.usefixtures("assets")
def test_the_vocabulary_reaches_model_and_loss_of_a_base(tmp_path: Path) -> None:
    resolved = loaded(tmp_path, "llama3.llama3_debugmodel_varlen_attn", "[model]\nvocab_size = 99\n")
    c = trainer_config(Trainer.Config, resolved.config)
    assert c.model_spec.model.vocab_size == c.loss.loss_fn.global_vocab_size == 99
    assert (
        type(c.model_spec.model.layers[0].attention.inner_attention).__qualname__ == "VarlenAttention.Config"
    )


@pytest.mark.usefixtures("assets")
def test_several_parameter_groups_stay_or_are_refused_but_are_never_flattened(tmp_path: Path) -> None:
    base = "qwen3.qwen3_debugmodel_moe_param_groups"
    c = trainer_config(Trainer.Config, loaded(tmp_path, base).config)
    assert len(c.optimizer.param_groups) == 3
    with pytest.raises(UserError, match="3 parameter groups"):
        trainer_config(Trainer.Config, loaded(tmp_path, base, "[optimizer]\nlr = 0.1\n").config)


def test_another_torchtitan_is_asked_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.metadata.version", lambda _: "0.3.7")
    upstream._table.cache_clear()
    try:
        assert loaded(tmp_path, "qwen3.qwen3_14b").config.training.steps == 3000
        assert upstream._table()["torchtitan"] == "0.3.7"
    finally:
        upstream._table.cache_clear()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('name = "llama4"', 'model.name: TorchTitan has no model "llama4"; did you mean llama3?'),
        ('flavor = "9B"', 'model.flavor: model "llama3" has no flavor "9B"; there are debugmodel, 1B, 3B'),
        ('flavor = "9B_flex"', 'model.flavor: model "llama3" has no flavor "9B_flex"'),
    ],
)
def test_models_that_do_not_exist_are_known_without_torchtitan(
    text: str, expected: str, tmp_path: Path
) -> None:
    file = tmp_path / "m.toml"
    file.write_text(f"[model]\n{text}\n")
    with pytest.raises(ConfigError) as caught:
        load_config(file)
    (problem,) = caught.value.problems
    assert problem.startswith(f"{file}:2: {expected}")


def test_a_mistake_beside_a_base_is_answered_within_two_seconds_without_torch(tmp_path: Path) -> None:
    file = tmp_path / "x.toml"
    file.write_text('[job]\nbase = "llama3.llama3_70b"\n[training]\nseq_len = 8191\n')
    done = validate(file, timeout_s=2)
    assert done.returncode == 2, done.stderr
    assert "training.seq_len: (8191) must be a multiple of" in done.stderr
