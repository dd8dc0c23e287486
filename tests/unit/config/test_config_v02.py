"""Configurations as people have them for TorchTitan v0.2 load with the right notes or are refused with the right names.

Each file in v02/ begins with what is expected of it: ``# loads`` or ``# refused``, then one line per note or problem,
``# note: KEY at LINE TEXT`` and ``# problem: KEY at LINE: TEXT`` (the line is left out where the file says it well enough).
"""

import re
from pathlib import Path
from typing import Any

import pytest
import tomli
import tomli_w
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from tests.helpers.config_values import toml_values
from torchtitan_diloco.config.deferred import depends_on_others
from torchtitan_diloco.config.fields import get, keys, sections
from torchtitan_diloco.config.load import ConfigError, Resolved, load_config, to_toml
from torchtitan_diloco.config.retired import HARMLESS, MOVED, NAME_MODULES, SAME_AS

FILES = sorted((Path(__file__).parent / "v02").glob("*.toml"))
IDS = [file.stem for file in FILES]


def attempt(file: Path) -> tuple[Resolved | None, list[str]]:
    """What the file loads to, or the problems; anything else raised is a failure."""
    try:
        return load_config(file), []
    except ConfigError as e:
        return None, e.problems


def expected(file: Path, kind: str) -> list[str]:
    return [
        line.split(": ", 1)[1] for line in file.read_text().splitlines() if line.startswith(f"# {kind}: ")
    ]


def same(wanted: list[str], found: list[str]) -> bool:
    """Whether each found line begins as exactly one wanted line does, key, line and text."""
    left = list(found)
    for text in wanted:
        match = next(
            (f for f in left if f.startswith(text) or re.sub(r" at \d+", " at ", f).startswith(text)), None
        )
        if match is None:
            return False
        left.remove(match)
    return not left


def test_there_are_files_of_every_kind() -> None:
    assert len(FILES) >= 20
    texts = [file.read_text() for file in FILES]
    assert {text.splitlines()[0] for text in texts} == {"# loads", "# refused"}
    for model in ("llama3", "qwen3", "deepseek_v3", "gpt_oss"):
        assert any(f'name = "{model}"' in text for text in texts)
    old = {s for s in sections() if "." not in s} - {"data", "island", "lighthouse", "transport", "syncer"}
    for section in old | {"fault_tolerance", "memory_estimation", "experimental"}:
        assert any(re.search(rf"^\[{section}[\].]", text, re.MULTILINE) for text in texts), section


@pytest.mark.parametrize("file", FILES, ids=IDS)
def test_a_configuration_of_v02_loads_or_is_refused_as_it_says(file: Path) -> None:
    resolved, problems = attempt(file)
    if resolved is None:
        found = [re.sub(rf"^{re.escape(str(file))}(?::(\d+))?: (.*?): ", r"\2 at \1: ", p) for p in problems]
        assert file.read_text().startswith("# refused"), found
        assert same(expected(file, "problem"), found), "\n".join(found)
        return
    assert file.read_text().startswith("# loads")
    about_keys = [n.replace(f"{file}:", "") for n in resolved.notes if f" at {file}:" in n]
    assert same(expected(file, "note"), about_keys), "\n".join(about_keys)


@pytest.mark.parametrize(
    "file", [f for f in FILES if f.read_text().startswith("# loads")], ids=lambda file: file.stem
)
def test_the_resolved_configuration_resolves_to_itself_and_holds_what_was_written(
    file: Path, tmp_path: Path
) -> None:
    first = load_config(file).config
    again = tmp_path / file.name
    again.write_text(to_toml(first))
    assert load_config(again).config == first
    for key, value in leaves(tomli.loads(file.read_text())):
        if key in keys() and key not in NAME_MODULES:
            assert get(first, key) == value, key


def test_the_old_diloco_configuration_becomes_ours() -> None:
    c = load_config(Path(__file__).parent / "v02" / "ft_diloco.toml").config
    assert (c.semi_sync.method, c.semi_sync.sync_every, c.semi_sync.num_islands) == ("diloco", 20, 2)
    assert (c.island.id, c.transport.kind, c.transport.exchange_timeout_s) == (1, "gloo", 30.0)


def test_all_defaults_of_v02_written_out_load_but_for_the_one_that_trains_differently(tmp_path: Path) -> None:
    text = (Path(__file__).parent / "v02" / "all_defaults.toml").read_text()
    file = tmp_path / "all.toml"
    file.write_text(text.replace('selective_ac_option = "2"', 'selective_ac_option = "op"'))
    notes = [note for note in load_config(file).notes if "is not used" in note]
    assert len(notes) == 6
    assert notes[-1].endswith('is not used: "quantize.grouped_mm.mx" is not in model.converters')
    for converter, count in (("quantize.linear.mx", 3), ("quantize.grouped_mm.mx", 2)):
        with pytest.raises(ConfigError) as caught:
            load_config(file, ["--model.converters", f'["{converter}"]'])
        assert len(caught.value.problems) == count
        assert all(f": {converter}." in problem for problem in caught.value.problems)


def test_the_output_layer_is_renamed_wherever_it_is_named(tmp_path: Path) -> None:
    file = tmp_path / "x.toml"
    file.write_text('[parallelism]\nmodule_fqns_per_model_part = [["norm"], ["output"]]\n')
    resolved = load_config(file, ["--quantize.linear.float8.filter_fqns", "output"])
    assert resolved.config.parallelism.module_fqns_per_model_part == [["norm"], ["lm_head"]]
    assert resolved.config.quantize.linear.float8.filter_fqns == ["lm_head"]
    assert (
        f'module_fqns_per_model_part at {file}:2 holds "output", which is "lm_head" now' in resolved.notes[0]
    )
    assert 'filter_fqns at command line holds "output"' in resolved.notes[1]


def test_the_overlap_of_a_pipeline_that_is_not_there_is_no_mistake(tmp_path: Path) -> None:
    file = tmp_path / "x.toml"
    file.write_text("[parallelism]\npipeline_parallel_expert_parallel_overlap = true\n")
    assert "has no effect without pipeline parallelism" in load_config(file).notes[0]


def test_an_old_key_in_a_table_of_an_island_is_answered_too(tmp_path: Path) -> None:
    file = tmp_path / "x.toml"
    file.write_text("[[islands]]\nid = 0\n[islands.validation]\nseq_len = 7\n")
    with pytest.raises(ConfigError, match=r":4: validation.seq_len: gone in TorchTitan 0.3"):
        load_config(file)


def leaves(document: dict[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    found = []
    for name, value in document.items():
        path = f"{prefix}.{name}" if prefix else name
        found += leaves(value, path) if isinstance(value, dict) else [(path, value)]
    return found


def put(document: dict[str, Any], key: str, value: Any) -> None:
    *parents, leaf = key.split(".")
    for part in parents:
        document = document.setdefault(part, {})
        assume(isinstance(document, dict))
    document[leaf] = value


def misspelt(name: str, at: int, letter: str) -> str:
    at %= len(name)
    return name[:at] + letter + name[at + 1 :]


@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_a_changed_key_or_type_is_named_and_never_becomes_a_silent_default(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Mutates one key of a real file: its name, its section, its value or its type."""
    document = tomli.loads(data.draw(st.sampled_from(FILES), "file").read_text())
    entries = [key for key, _ in leaves(document) if "." in key]
    key = data.draw(st.sampled_from(entries), "key")
    section, _, leaf = key.rpartition(".")
    change = data.draw(st.sampled_from(["name", "section", "value"]), "change")
    value = dict(leaves(document))[key]
    if change == "value":
        value, target = data.draw(toml_values, "value"), key
    elif change == "name":
        at, letter = data.draw(st.integers(0, 99), "at"), data.draw(st.sampled_from("aeiou_-x"), "letter")
        target = f"{section}.{misspelt(leaf, at, letter)}"
    else:
        target = f"{data.draw(st.sampled_from([*sections(), 'experimental', 'nosuch']), 'section')}.{leaf}"
    assume(change == "value" or target != key)
    put(document, target, value)
    file = tmp_path_factory.getbasetemp() / "mutated.toml"
    file.write_bytes(tomli_w.dumps(document).encode())
    resolved, problems = attempt(file)
    if resolved is None:
        assert problems and all("\n" not in p and p.startswith(str(file)) for p in problems)
        right = target in keys() or target in MOVED or target in SAME_AS or value in HARMLESS.get(target, ())
        right |= depends_on_others(target, value)  # nothing is wrong with it where what it belongs to is off
        if not right and not isinstance(value, dict) and not target.startswith("fault_tolerance."):
            section = target.rpartition(".")[0]
            assert any(f" {target}: " in p or f" {section}: " in p for p in problems)
        return
    if target in keys():
        found = get(resolved.config, target)
        assert found == value or isinstance(value, list) or target == "job.name" or value == "none"
        assert resolved.origins[target].startswith(f"{file}:")
    elif not isinstance(value, dict):
        assert any(
            f"{target} at {file}:" in n or f"fault_tolerance at {file}:" in n for n in resolved.notes
        ) or (target in ("fault_tolerance.enable", "validation.local_batch_size", "validation.seq_len"))


WRONG = """\
[diloco]
sync_step = 64

[training]
sync_every = 64

[experimental]
custom_import = "x"

[semi_sync]
sync_every = "64"

[fault_tolerance]
enable = true
semi_sync_method = "diloco"
fragment_update_alpha = 0.5
"""


def test_fr_22_a_wrong_key_is_an_error_with_key_section_and_the_nearest_name(tmp_path: Path) -> None:
    file = tmp_path / "wrong.toml"
    file.write_text(WRONG)
    with pytest.raises(ConfigError) as caught:
        load_config(file, ["--semi_sync.sync_step", "64"])
    wanted = [
        f"{file}:1: diloco: unknown section; did you mean [semi_sync]?",
        f"{file}:2: diloco.sync_step: unknown key; did you mean semi_sync.sync_every?",
        f"{file}:5: training.sync_every: unknown key; did you mean semi_sync.sync_every?",
        f"{file}:8: experimental.custom_import: gone in TorchTitan 0.3: remove it; a package adds methods",
        f'{file}:11: semi_sync.sync_every: must be an integer, got a string ("64"); write 64 without quotes',
        f"{file}:16: fault_tolerance.fragment_update_alpha: set it to 0.0 or remove it",
        "command line: semi_sync.sync_step: unknown key; did you mean semi_sync.sync_every?",
    ]
    assert len(caught.value.problems) == len(wanted), caught.value.problems
    for problem, begin in zip(caught.value.problems, wanted, strict=True):
        assert problem.startswith(begin)
