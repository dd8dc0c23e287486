"""Names that settings choose from: the same as in the registries, told without them, and open to third parties."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.light_cli import validate
from tests.helpers.mistakes import problems
from torchtitan_diloco.config.load import load_config
from torchtitan_diloco.outer import names

PLUGIN = """
from torchtitan_diloco.semi_sync import register_semi_sync
from torchtitan_diloco.semi_sync.none import NoSync

@register_semi_sync("gossip")
class Gossip(NoSync):
    pass
"""


def test_the_table_holds_what_the_registries_hold() -> None:
    from torchtitan_diloco.exchange import find_transport
    from torchtitan_diloco.exchange.transport import _TRANSPORTS
    from torchtitan_diloco.outer.codec import registered, registry
    from torchtitan_diloco.outer.merge import ELEMENTWISE
    from torchtitan_diloco.semi_sync.method import _METHODS

    assert find_transport("gloo")
    assert set(_METHODS) == set(names.SHIPPED[names.METHOD])
    assert set(_TRANSPORTS) == set(names.SHIPPED[names.TRANSPORT])
    assert set(registered()) == set(names.SHIPPED[names.WIRE]) == names.WIRE_SETTINGS.keys()
    assert {wire: set(takes) for wire, (_, takes) in registry._makers.items()} == {
        wire: set(takes) for wire, takes in names.WIRE_SETTINGS.items()
    }
    assert set(names.SHIPPED[names.MERGE]) == ELEMENTWISE


@pytest.mark.parametrize("setting", names.SHIPPED)
def test_an_unknown_name_is_refused_with_those_there_are(tmp_path: Path, setting: str) -> None:
    (found,) = problems(tmp_path, "", f"--{setting}", "pigeon")
    assert found.startswith(f"command line: {setting}: must be ") and found.endswith('got "pigeon"')
    assert all(f'"{name}"' in found for name in names.SHIPPED[setting])


def test_the_name_that_was_meant_is_given_and_the_line(tmp_path: Path) -> None:
    (found,) = problems(tmp_path, '[semi_sync]\nmethod = "dilco"\n')
    assert found.startswith(
        'FILE:2: semi_sync.method: must be "none", "sync", "local_sgd", "diloco" or a name'
    )
    assert found.endswith('got "dilco"; did you mean "diloco"?')


def test_validate_refuses_all_of_them_at_once_without_torch(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(
        '[transport]\nkind = "pigeon"\n[semi_sync]\nmethod = "dilco"\nouter.name = "adam"\n'
        'merge.method = "median"\ncodec.wire = "int3"\n'
    )
    done = validate(file, timeout_s=20)
    assert done.returncode == 2, done.stderr
    blamed = [line.split(": ")[2] for line in done.stderr.splitlines()]
    assert set(blamed) == set(names.SHIPPED)


@pytest.mark.parametrize(
    ("text", "blamed", "says"),
    [
        ('wire = "int8"\ndensity = 0.1', "density", '(0.1) is no setting of the codec "int8"; remove it'),
        ('wire = "topk"\nblock = 64', "block", '(64) is no setting of the codec "topk"; remove it'),
    ],
)
def test_a_setting_that_the_codec_does_not_have_is_refused(
    tmp_path: Path, text: str, blamed: str, says: str
) -> None:
    (found,) = problems(tmp_path, f"[semi_sync.codec]\n{text}\n")
    assert found.startswith(f"FILE:3: semi_sync.codec.{blamed}: {says}")


def test_a_module_in_two_fragments_is_refused(tmp_path: Path) -> None:
    (found,) = problems(
        tmp_path, '[semi_sync]\nmodule_fqns_per_fragment = [["layers.0"], ["layers.0", "norm"]]\n'
    )
    assert found == (
        "FILE:2: semi_sync.module_fqns_per_fragment: ([['layers.0'], ['layers.0', 'norm']]) names a module in two lists; "
        "keep it in the list of the fragment that it belongs to"
    )


def test_a_number_of_fragments_beside_lists_that_say_another_is_refused(tmp_path: Path) -> None:
    text = '[semi_sync]\nfragments = 4\nmodule_fqns_per_fragment = [["a"], ["b"]]\n'
    (found,) = problems(tmp_path, text)
    assert found.startswith(
        "FILE:2: semi_sync.fragments: (4) does not go with semi_sync.module_fqns_per_fragment"
    )
    assert load_config(tmp_path / "run.toml", ["--semi_sync.fragments", "2"])


@pytest.mark.parametrize("method", ["diloco", "local_sgd"])
def test_islands_in_processes_of_their_own_cannot_meet_in_memory(tmp_path: Path, method: str) -> None:
    text = f'[transport]\nkind = "memory"\n[semi_sync]\nmethod = "{method}"\nnum_islands = 2\n'
    (found,) = problems(tmp_path, text)
    assert found.startswith('FILE:2: transport.kind: ("memory") joins islands that live in one process')
    assert found.endswith('use "gloo"')
    assert load_config(tmp_path / "run.toml", ["--semi_sync.num_islands", "1"])


def test_a_name_that_this_process_has_registered_is_accepted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(names, "_added", {setting: set() for setting in names.EXTENSIBLE})
    names.add(names.TRANSPORT, "pigeon")
    (tmp_path / "run.toml").write_text('[transport]\nkind = "pigeon"\n[semi_sync]\nnum_islands = 2\n')
    assert load_config(tmp_path / "run.toml").config.transport.kind == "pigeon"


def test_a_name_that_an_installed_package_declares_is_known_before_and_loaded_when_it_is_used(
    tmp_path: Path,
) -> None:
    """In a process of its own: what it registers would stay."""
    (tmp_path / "my_package.py").write_text(PLUGIN)
    metadata = tmp_path / "my_package-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: my_package\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[torchtitan_diloco.semi_sync.method]\ngossip = my_package\n")
    (tmp_path / "run.toml").write_text('[semi_sync]\nmethod = "gossip"\n')
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
        "from torchtitan_diloco.config.load import load_config\n"
        f"load_config({str(tmp_path / 'run.toml')!r})\n"
        "assert 'my_package' not in sys.modules and 'torch' not in sys.modules\n"
        "from torchtitan_diloco.semi_sync import method_class\n"
        "print(method_class('gossip').__name__)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout == "Gossip\n", done.stderr
