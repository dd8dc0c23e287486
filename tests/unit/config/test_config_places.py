"""Where things are written, and to whom they are told: no two islands to one path, no password into a message."""

from pathlib import Path

import pytest

from torchtitan_diloco.config.load import ConfigError, load_config

FOLDERS = [
    ("checkpoint", "folder"),
    ("metrics", "save_tb_folder"),
    ("profiling", "save_traces_folder"),
    ("profiling", "save_memory_snapshot_folder"),
    ("comm", "save_traces_folder"),
    ("job", "save_config_file"),
]


def write(folder: Path, text: str) -> Path:
    file = folder / "run.toml"
    file.write_text(f'[model]\nname = "llama3"\nflavor = "debugmodel"\n{text}')
    return file


@pytest.mark.parametrize("section, key", FOLDERS)
@pytest.mark.parametrize("path", ["/scratch/me", "../common", "a/../../b", "s3://bucket/run"])
def test_fr42_a_path_that_several_islands_would_write_is_refused(
    tmp_path: Path, section: str, key: str, path: str
) -> None:
    file = write(tmp_path, f'[{section}]\n{key} = "{path}"\n')
    with pytest.raises(ConfigError) as caught:
        load_config(file, ["--semi_sync.num_islands", "2"])
    (problem,) = caught.value.problems
    assert problem.startswith(f'{file}:5: {section}.{key}: ("{path}") leads out of the island\'s folder')
    assert "job.dump_folder" in problem and "island-0" in problem
    assert load_config(file, ["--semi_sync.num_islands", "1"])


def test_fr42_a_path_inside_the_islands_folder_or_named_after_it_is_taken(tmp_path: Path) -> None:
    for path in ("checkpoint", "a/b", "a/../b", "/scratch/run/island-0/checkpoint"):
        file = write(tmp_path, f'[checkpoint]\nfolder = "{path}"\n[semi_sync]\nnum_islands = 2\n')
        assert load_config(file).config.checkpoint.folder == path
    with pytest.raises(ConfigError, match="leads out of the island's folder"):
        load_config(file, ["--island.id", "1"])


def test_fr42_islands_may_each_have_a_place_of_their_own_elsewhere(tmp_path: Path) -> None:
    tables = "[[islands]]\nid = {0}\n[islands.checkpoint]\nfolder = '/scratch/island-{1}/checkpoint'\n"
    assert load_config(write(tmp_path, tables.format(0, 0) + tables.format(1, 1)))
    with pytest.raises(ConfigError, match=r"island-1 in it .*\(island 1\)"):
        load_config(write(tmp_path, tables.format(0, 0) + tables.format(1, 0)))


ADDRESSES = [
    '[transport]\nurls = ["https://me:hunter2@hub.example.org"]',
    '[transport]\nurls = ["http://a:1", "https://me:hunt/er2@hub.example.org:443/x"]',
    '[transport]\nurls = "https://me:a-long-password-of-more-than-forty-letters-hunter2@hub.example.org"',
    '[transport]\nurls = ["me:hunter2@hub.example.org:443"]',
    '[transport]\nurls = ["https://hunter2@hub.example.org"]',
    '[lighthouse]\naddress = "http://me:hunter2@hub.example.org:29510"',
    '[lighthouse]\naddress = "me:hunter2@hub.example.org:29510"',
    '[syncer]\nbind = "me:hunter2@hub.example.org"',
]


@pytest.mark.parametrize("text", ADDRESSES)
def test_a_password_in_an_address_is_refused_without_saying_it(tmp_path: Path, text: str) -> None:
    file = write(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        load_config(file)
    said = str(caught.value)
    assert f"{file}:5: " in said and said.count("\n") == 0
    assert not any(secret in said for secret in ("hunter2", "hunt", "er2", "a-long"))
    if "urls = [" in text:
        assert (
            "without user or password" in said
            and "transport.token_file" in said
            and "...@hub.example.org" in said
        )


def test_a_password_on_the_command_line_is_not_said_either(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(write(tmp_path, ""), ["--transport.urls", "https://me:hunter2@hub.example.org"])
    assert str(caught.value).startswith("command line: transport.urls: must be addresses such as")
    assert "hunter2" not in str(caught.value)


def test_what_only_looks_a_little_like_a_secret_is_quoted(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r'got a string \("me@example\.org: x"\)'):
        load_config(write(tmp_path, '[training]\nsteps = "me@example.org: x"\n'))
