"""For any input: written and loaded is the same, and what is not loaded is refused."""

from pathlib import Path
from typing import Any

import pytest
import tomli_w
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.helpers.config_values import TEXT, changed, configs, toml_values
from torchtitan_diloco.config import ranges
from torchtitan_diloco.config.fields import get, keys, put, sections
from torchtitan_diloco.config.load import ConfigError, Resolved, load_config, to_toml
from torchtitan_diloco.config.rules import broken_ranges, broken_relations
from torchtitan_diloco.config.schema import RunConfig


def attempt(file: Path, *overrides: str) -> tuple[Resolved | None, list[str]]:
    """What the file loads to, or the problems; anything else raised is a failure."""
    try:
        return load_config(file, overrides), []
    except ConfigError as e:
        return None, e.problems


NO_BASE = {key: get(RunConfig(), key) for key in keys()}
LENIENT = settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))


@LENIENT
@given(config=configs())
def test_written_and_loaded_is_the_same(config: RunConfig, tmp_path_factory: pytest.TempPathFactory) -> None:
    """For every configuration the loader accepts; of the others, that it refuses exactly those that break a rule."""
    broken = {key for key, _ in broken_ranges(config)}
    broken |= {keys[0] for keys, _ in broken_relations(config) if not broken.intersection(keys)}
    file = tmp_path_factory.getbasetemp() / "written.toml"
    file.write_bytes(to_toml(config).encode())
    if broken:
        problems = attempt(file)[1]
        assert {p.split(": ")[1] for p in problems} == broken
        return
    config.job.name = config.job.name or "written"
    assert load_config(file).config == config


@pytest.mark.parametrize("key", sorted(k for k, kind in keys().items() if len(kind.choices) != 1))
def test_every_key_is_written_and_loaded(key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One value other than the default per key, types included; ranges are switched off for the time."""
    monkeypatch.setattr(ranges, "RANGES", {})
    config = RunConfig()
    config.job.name = "written"
    other = changed(key)
    put(config, key, other)
    loaded = load_config_unruled(tmp_path, to_toml(config), monkeypatch)
    assert loaded == config
    assert type(get(loaded, key)) is type(other)
    put(config, key, get(RunConfig(), key))
    assert loaded != config or key == "job.name"


def load_config_unruled(tmp_path: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> RunConfig:
    monkeypatch.setattr("torchtitan_diloco.config.load.broken_relations", lambda *_: ())
    monkeypatch.setattr("torchtitan_diloco.config.load.unknown_model", lambda *_: ())
    monkeypatch.setattr("torchtitan_diloco.config.load.unknown_base", lambda _: "")
    for module in ("load", "notes"):
        monkeypatch.setattr(f"torchtitan_diloco.config.{module}.base_values", lambda _: NO_BASE)
    file = tmp_path / "written.toml"
    file.write_text(text)
    return load_config(file).config


@LENIENT
@given(
    section=st.sampled_from([*sections(), "", "trainign"]),
    name=st.sampled_from([k.rpartition(".")[2] for k in keys()]) | TEXT,
    value=toml_values,
)
def test_any_key_with_any_value_is_loaded_or_refused(
    section: str, name: str, value: object, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """No other exception, and never the default in silence."""
    document: dict[str, Any] = {name: value}
    for part in reversed(section.split(".") if section else []):
        document = {part: document}
    file = tmp_path_factory.getbasetemp() / "mutated.toml"
    file.write_bytes(tomli_w.dumps(document).encode())
    key = f"{section}.{name}" if section else name
    resolved, problems = attempt(file)
    if resolved is None:
        assert problems
        assert all(p.startswith((f"{file}:", f"{file}: ")) and "\n" not in p for p in problems)
        return
    if isinstance(value, dict) and not any(isinstance(v, dict) for v in value.values()) and key in sections():
        assert all(f"{key}.{leaf}" in keys() for leaf in value)
        return
    if key in keys():
        assert get(resolved.config, key) == value or key == "job.name" or isinstance(value, list)
        assert resolved.origins[key].startswith(f"{file}:")
    else:
        assert isinstance(value, dict) or f"{key} at {file}:" in resolved.notes[0]


@LENIENT
@given(
    key=st.sampled_from(sorted(keys())),
    text=TEXT | st.sampled_from(["1", "-1", "0.5", "true", "[]", "[1]", "{}", "None"]),
)
def test_any_command_line_value_is_taken_or_refused(
    key: str, text: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    file = tmp_path_factory.getbasetemp() / "empty.toml"
    file.write_text("")
    resolved, problems = attempt(file, f"--{key}={text}")
    if resolved is None:
        assert problems
        assert all(p.startswith("command line: ") and "\n" not in p for p in problems)
        return
    assert resolved.origins[key] == "command line"
    if keys()[key].base in ("str", "choice") and not keys()[key].optional and key != "job.name":
        assert get(resolved.config, key) == text


@LENIENT
@given(
    argv=st.lists(
        st.sampled_from(
            ["--", "--x", "-1", "=", "--training.steps", "3", "--=", "--no-", "--a.b=", "--debug.seed="]
        )
        | TEXT
    )
)
def test_any_command_line_is_taken_or_refused(
    argv: list[str], tmp_path_factory: pytest.TempPathFactory
) -> None:
    file = tmp_path_factory.getbasetemp() / "empty.toml"
    file.write_text("")
    resolved, problems = attempt(file, *argv)
    assert (resolved is None) == bool(problems)


@LENIENT
@given(text=st.text(st.sampled_from("[]{}=.,#\"' \n\\abtraining1-"), max_size=60))
def test_any_text_is_loaded_or_refused(text: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    file = tmp_path_factory.getbasetemp() / "noise.toml"
    file.write_text(text)
    resolved, problems = attempt(file)
    assert (resolved is None) == bool(problems)
