"""`torchtitan-diloco run` over a fake trainer: how runs end, stop, restart, and what they leave behind."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.helpers.launcher import Run, eventually
from torchtitan_diloco.config.load import load_config

Start = Callable[..., Run]


def logs(run: Run, island: int) -> str:
    return "".join(path.read_text() for path in sorted((run.folder / f"island-{island}" / "logs").iterdir()))


def incarnations(run: Run, island: int) -> list[str]:
    return list(dict.fromkeys(event["incarnation"] for event in run.events(island)))


def test_a_run_ends_with_exit_code_0_a_closing_table_and_a_complete_run_folder(start_run: Start) -> None:
    run = start_run("--ranks", "2,1", "--debug.deterministic")
    assert run.end() == 0, run.output
    row = re.search(r"^ *0 +done +(.*)$", run.output, re.MULTILINE)
    assert row and row[1].split()[:5] == ["10", "1,000", "4.0000", "0.7273", "5"], run.output
    assert "anchors are equal at slot 5" in run.output
    assert f"run folder: {run.folder}" in run.output
    assert {p.name for p in run.folder.iterdir()} == {
        ".lock",
        "config.toml",
        "run.json",
        "island-0",
        "island-1",
    }
    record = run.record()
    assert record["ranks"] == [2, 1] and record["islands"] == 2 and record["name"] == "trial"
    assert record["versions"]["torch"] and record["digests"]["config"]
    assert "deterministic = true" in (run.folder / "config.toml").read_text()
    assert logs(run, 0).count("fake trainer") == 1 and len(incarnations(run, 0)) == 1


TABLES = """
[[islands]]
id = 1
[[islands]]
id = 0
nodes = 2
ranks = 1
training.local_batch_size = 3
"""


def test_islands_and_their_ranks_come_from_the_tables_and_each_trainer_is_told_which_one_it_is(
    start_run: Start,
) -> None:
    run = start_run("--training.gc_freq", "9", tables=TABLES)
    assert run.end() == 0, run.output
    assert run.record()["ranks"] == [2, 1]
    assert '"--island.id", "1"' in logs(run, 1)
    own = load_config(run.folder / "config.toml", ["--island.id", "0"]).config
    assert (own.training.local_batch_size, own.training.gc_freq, own.island.id) == (3, 9, 0)
    other = load_config(run.folder / "config.toml", ["--island.id", "1"]).config
    assert (other.training.local_batch_size, other.semi_sync.num_islands) == (8, 2)


def test_another_number_of_islands_than_the_tables_is_refused(start_run: Start) -> None:
    run = start_run("--islands", "3", tables=TABLES)
    assert run.end() == 2
    assert (
        "semi_sync.num_islands: (3) is not the number of [[islands]] tables (2); leave it out" in run.output
    )
    assert not run.folder.exists()


def test_degrees_that_do_not_fit_the_ranks_are_refused_before_anything_starts(start_run: Start) -> None:
    run = start_run("--ranks", "3", "--parallelism.tensor_parallel_degree", "2")
    assert run.end() == 2
    assert "island 0: parallelism.data_parallel_shard_degree: (-1) x" in run.output
    assert not run.folder.exists()


def test_trainers_get_their_identity_and_none_of_what_would_override_the_configuration(
    start_run: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHFT_LIGHTHOUSE", "http://elsewhere:1")
    monkeypatch.setenv("PET_NNODES", "4")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    run = start_run(steps=2)
    assert run.end() == 0, run.output
    log = logs(run, 1)
    assert '"--island.id", "1"' in log
    assert "TORCHFT_" not in log and "PET_" not in log
    assert f'"TORCHTITAN_DILOCO_RUN_ID": "{run.record()["run_id"]}"' in log
    assert f'"TORCHTITAN_DILOCO_INCARNATION": "{incarnations(run, 1)[0]}"' in log
    assert re.search(r'"OMP_NUM_THREADS": "[1-9]', log)
    assert '"GLOO_SOCKET_IFNAME": "lo"' in log and '"PYTHONUNBUFFERED": "1"' in log


def test_a_drained_run_exits_75_and_the_same_command_continues_it_to_the_end(start_run: Start) -> None:
    first = start_run("--training.steps", "500", steps=500)
    first.wait_for_step(3)
    first.signal(signal.SIGINT)
    assert first.end() == 75, first.output
    assert {first.state(i)["state"] for i in (0, 1)} == {"resume"}
    assert "island 0 saved at step" in first.output and "first" in first.output
    reached, run_id = first.state(0)["step"], first.record()["run_id"]

    second = start_run("--training.steps", "500", steps=reached + 5)
    assert second.end() == 0, second.output
    assert "continuing the unfinished run" in second.output
    assert second.record()["run_id"] == run_id
    steps = [e["step"] for e in second.events(0) if e["event"] == "inner"]
    assert steps == list(range(1, reached + 6))


def test_a_second_stop_signal_kills_islands_that_do_not_leave(start_run: Start) -> None:
    run = start_run(steps=5000, deaf=[1])
    run.wait_for_step(2)
    tree = run.tree()
    run.signal()
    run.signal()
    time.sleep(1.2)
    assert run.state(0)["state"] == "resume" and run.process.poll() is None, (
        "two signals at once are one: `timeout` does that"
    )
    run.signal()
    assert run.end() == 1
    assert not [p for p in tree if p.is_running()]


def test_an_island_whose_torchrun_is_killed_comes_back_alone_and_the_run_ends_well(start_run: Start) -> None:
    run = start_run(steps=40, step_s=0.02)
    run.wait_for_step(3)
    (torchrun,) = [p for p in run.matching("fake_torchrun.py") if p.cmdline()[-1] == "1"]
    workers = torchrun.children()
    torchrun.kill()
    eventually(lambda: not any(w.is_running() for w in workers), within_s=3)
    assert run.end() == 0, run.output
    assert "island 1 ended with signal SIGKILL; starting it again in 1 s" in run.output
    assert len(incarnations(run, 1)) == 2 and len(incarnations(run, 0)) == 1
    assert re.search(r"^ *1 +done .* 1 +ababababab", run.output, re.MULTILINE), run.output


def test_an_island_that_dies_without_progress_is_given_up_and_the_others_finish(start_run: Start) -> None:
    run = start_run("--max-restarts", "1", crash={"1": 2}, steps=20)
    assert run.end() == 1, run.output
    assert "starting it again in 1 s" in run.output
    assert "island 1 ended with exit code 1, 2 times without progress: given up" in run.output
    assert len(incarnations(run, 1)) == 3 - 1 and run.state(0)["state"] == "done"


def test_an_island_that_dies_after_its_end_is_done_and_the_death_is_told(start_run: Start) -> None:
    run = start_run(dies_late=[1])
    assert run.end() == 0, run.output
    assert "island 1 is done at step 10, then ended with exit code 1, see " in run.output


def test_a_fatal_island_stops_the_run_with_its_reason_and_is_not_restarted(start_run: Start) -> None:
    run = start_run(fatal={"1": "data.sources: manifests differ"}, steps=1000)
    assert run.end() == 2, run.output
    assert "island 1 cannot go on: data.sources: manifests differ" in run.output
    assert logs(run, 1).count("fake trainer") == 1


def test_islands_that_end_with_different_anchors_make_the_run_fail(start_run: Start) -> None:
    run = start_run(digest={"1": "cd" * 32})
    assert run.end() == 1, run.output
    assert "anchors DIFFER at slot 5: island 0: ababababab, island 1: cdcdcdcdcd" in run.output


def test_nothing_is_left_three_seconds_after_the_launcher_is_killed(start_run: Start) -> None:
    run = start_run("--ranks", "2", steps=5000, deaf=[0, 1])
    run.wait_for_step(1)
    tree = run.tree()
    assert len(tree) == 6, "two torchruns with two workers each"
    os.kill(run.process.pid, signal.SIGKILL)
    eventually(
        lambda: not [p for p in tree if p.is_running() and p.status() != psutil.STATUS_ZOMBIE], within_s=3
    )


def test_a_second_run_in_the_same_folder_is_refused_and_harms_nothing(start_run: Start) -> None:
    first = start_run(steps=5000)
    first.wait_for_step(1)
    second = start_run("--fresh")
    assert second.end() == 2
    assert f"is in use by another `run` (pid {first.process.pid} on " in second.output
    first.signal()
    assert first.end() == 75, first.output


def test_a_finished_run_is_moved_aside_unless_more_steps_are_asked_for(
    start_run: Start, tmp_path: Path
) -> None:
    assert start_run().end() == 0
    more = start_run("--training.steps", "14", steps=14)
    assert more.end() == 0, more.output
    assert "from step 10 to 14" in more.output and more.events(0)[-1]["step"] == 14
    again = start_run("--training.steps", "14")
    assert again.end() == 0, again.output
    assert "is done at step 14; moved aside to" in again.output
    (aside,) = tmp_path.glob("trial.2*")
    assert re.fullmatch(r"trial\.\d{8}-\d{6}", aside.name)
    assert (aside / "island-0" / "events.jsonl").exists()
    assert [e["step"] for e in again.events(0) if e["event"] == "start"] == [0]


def test_an_unfinished_run_with_other_settings_is_refused_naming_them_until_fresh_is_given(
    start_run: Start, tmp_path: Path
) -> None:
    run = start_run(steps=500)
    run.wait_for_step(2)
    run.signal()
    assert run.end() == 75
    before = (run.folder / "config.toml").read_bytes()
    other = start_run("--semi_sync.sync_every", "7")
    assert other.end() == 2
    assert "semi_sync.sync_every was 100, is 7" in other.output and "--fresh" in other.output
    assert (run.folder / "config.toml").read_bytes() == before
    fresh = start_run("--semi_sync.sync_every", "7", "--fresh")
    assert fresh.end() == 0, fresh.output
    assert len(list(tmp_path.glob("trial.2*"))) == 1


def test_a_run_that_ended_before_its_first_step_does_not_stand_in_the_way_of_the_corrected_one(
    start_run: Start, tmp_path: Path
) -> None:
    assert (
        start_run(
            "--semi_sync.sync_every", "7", fatal=dict.fromkeys("01", "model.flavor: no such flavor")
        ).end()
        == 2
    )
    corrected = start_run("--semi_sync.sync_every", "5")
    assert corrected.end() == 0, corrected.output
    assert "ended before its first inner step; replaced" in corrected.output
    assert not list(tmp_path.glob("trial.2*"))


def test_a_lighthouse_that_does_not_answer_is_refused_before_anything_is_written(start_run: Start) -> None:
    run = start_run("--semi_sync.method", "diloco", "--lighthouse.address", "http://127.0.0.1:9")
    assert run.end() == 2
    assert run.output.startswith("lighthouse.address: nothing answers at http://127.0.0.1:9")
    assert not run.folder.exists()


def test_a_run_starts_its_own_lighthouse_tells_the_trainers_and_takes_it_down(start_run: Start) -> None:
    run = start_run("--semi_sync.method", "diloco", steps=5000)
    run.wait_for_step(1)
    (lighthouse,) = run.matching("torchtitan_diloco lighthouse")
    ports = [c.laddr for c in lighthouse.net_connections("tcp") if c.status == psutil.CONN_LISTEN]
    assert [address.ip for address in ports] == ["127.0.0.1"]
    assert f'"--lighthouse.address", "http://127.0.0.1:{ports[0].port}"' in logs(run, 0)
    lighthouse.kill()
    eventually(lambda: set(run.matching("torchtitan_diloco lighthouse")) - {lighthouse})
    run.signal()
    assert run.end() == 75, run.output
    assert "Lighthouse ended with code -9" in run.output and "Lighthouse started again" in run.output
    assert (run.folder / "lighthouse.log").exists()
    assert not [p for p in run.folder.iterdir() if "port" in p.name]


def test_missing_tokenizer_and_missing_data_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    config = tmp_path / "c.toml"
    config.write_text(
        f'[job]\ndump_folder = "{tmp_path}/out"\n[model]\nflavor = "debugmodel"\n[semi_sync]\nmethod = "none"\n'
        f'[[data.sources]]\npath = "{tmp_path}/corpus"\n'
    )
    for arguments, named in (
        (["--model.hf_assets_path", str(tmp_path / "none")], "model.hf_assets_path"),
        (["--model.hf_assets_path", "bundled:bpe2048"], "data.sources"),
    ):
        done = subprocess.run(
            [sys.executable, "-m", "torchtitan_diloco", "run", str(config), *arguments],
            capture_output=True,
            text=True,
            timeout=30,
        )
        assert done.returncode == 2 and named in done.stderr and "Traceback" not in done.stderr, done.stderr
        assert not (tmp_path / "out").exists()
