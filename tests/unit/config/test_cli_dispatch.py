"""The command line: what runs, what is printed, and how it ends."""

import sys
import types
from pathlib import Path

import pytest

from torchtitan_diloco import cli
from torchtitan_diloco.errors import Resumable, UserError

REPO = Path(__file__).parents[3]


def command(monkeypatch: pytest.MonkeyPatch, outcome: BaseException | int) -> list[list[str]]:
    """Install a fake `run` that returns or raises; returns the arguments it was called with."""
    calls: list[list[str]] = []

    def main(argv: list[str]) -> int:
        calls.append(argv)
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    module = types.ModuleType("torchtitan_diloco.cli.run")
    module.main = main  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torchtitan_diloco.cli.run", module)
    return calls


@pytest.mark.parametrize(
    ("outcome", "code", "printed"),
    [
        (0, 0, ""),
        (1, 1, ""),
        (
            UserError("training.steps: wrong\nmodel.name: wrong"),
            2,
            "error: training.steps: wrong\nerror: model.name: wrong\n",
        ),
        (Resumable("walltime"), 75, "stopped early, can be continued: walltime\n"),
        (KeyboardInterrupt(), 130, "interrupted\n"),
    ],
    ids=["done", "failed", "user error", "resumable", "interrupted"],
)
def test_how_a_command_ends_is_its_exit_code(
    outcome: BaseException | int,
    code: int,
    printed: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    calls = command(monkeypatch, outcome)
    with pytest.raises(SystemExit) as ended:
        cli.main(["run", "a.toml", "--islands", "2"])
    assert ended.value.code == code
    assert calls == [["a.toml", "--islands", "2"]]
    assert capsys.readouterr().err == printed


def test_a_defect_keeps_its_stack_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    command(monkeypatch, ZeroDivisionError("defect"))
    with pytest.raises(ZeroDivisionError):
        cli.main(["run"])


@pytest.mark.parametrize("argv", [[], ["nothing"], ["--training.steps"], ["__init__"]])
def test_no_such_command_is_wrong_usage(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.dispatch(argv) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ") and "\nusage: torchtitan-diloco COMMAND" in said


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.dispatch(["--help"]) == 0
    said = capsys.readouterr().out
    assert all(f"  {name} " in said for name in cli.COMMANDS)


def test_validate_prints_every_value_with_its_origin(capsys: pytest.CaptureFixture[str]) -> None:
    file = REPO / "train_configs" / "quickstart.toml"
    assert cli.dispatch(["validate", str(file), "--training.steps", "40"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    shown = {line[0]: line[2:] for line in lines if len(line) > 3 and line[1] == "="}
    assert shown["training.steps"] == ["40", "command", "line"]
    assert shown["semi_sync.sync_every"][0] == "10"
    assert shown["semi_sync.sync_every"][1].startswith(f"{file}:")
    assert shown["optimizer.weight_decay"] == ["0.1", "default"]
    assert shown["debug.dump_sends"] == ["false", "default"]
    assert shown["data.sources[0].prepare_from"][0] == '"bundled:kjv"'
    assert shown["lr_scheduler.decay_ratio"] == ["(absent)", "default"]


def test_validate_reports_the_problems_of_all_files_and_prints_nothing_else(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("a", "b"):
        (tmp_path / f"{name}.toml").write_text("[training]\nsteps = 0\n")
    good = REPO / "train_configs" / "quickstart.toml"
    argv = ["validate", str(tmp_path / "a.toml"), str(good), str(tmp_path / "b.toml"), "--optimizer.lr", "0"]
    assert cli.dispatch(argv) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines() == [
        f"error: {tmp_path}/a.toml:2: training.steps: must be at least 1, got 0",
        "error: command line: optimizer.lr: must be greater than 0, got 0.0",
        f"error: {tmp_path}/b.toml:2: training.steps: must be at least 1, got 0",
    ]


def test_a_file_that_names_no_model_is_not_trained_with_the_default_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "a.toml"
    file.write_text("[training]\nsteps = 3\n")
    sentence = (
        f"error: {file}: model.name, model.flavor: neither is given, and nor is job.base; say which model to train, "
        'for instance [model] name = "llama3", flavor = "debugmodel"\n'
    )
    for command in ("validate", "run"):
        assert cli.dispatch([command, str(file)]) == 2
        assert capsys.readouterr().err == sentence
    for said in (["--model.flavor", "debugmodel"], ["--job.base", "llama3.llama3_debugmodel"]):
        assert cli.dispatch(["validate", str(file), *said]) == 0
        out, err = capsys.readouterr()
        assert f"{file}: valid" in out and err == ""


def test_validate_refuses_a_spool_without_its_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "run.toml"
    file.write_text(
        '[model]\nname = "llama3"\nflavor = "debugmodel"\n[semi_sync]\nmethod = "diloco"\n[transport]\nkind = "spool"\n'
    )
    assert cli.dispatch(["validate", str(file)]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"error: {file}: transport.dir is empty: ") and "--transport.dir" in said
    assert cli.dispatch(["validate", str(file), "--transport.dir", "/spool"]) == 0


def test_validate_without_a_file_says_how_to_use_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.dispatch(["validate", "--training.steps", "3"]) == 2
    assert "usage: torchtitan-diloco validate FILE..." in capsys.readouterr().err
