"""FR-66: what an island of a real run is doing can be seen without a debugger."""

from pathlib import Path

from tests.helpers.real_run import local_run, write_config


def test_fr_66_touching_dump_in_an_islands_folder_writes_the_stacks_of_each_of_its_ranks(
    tmp_path: Path, corpus: Path
) -> None:
    config = write_config(tmp_path, corpus)
    arguments = (
        "--islands",
        "1",
        "--ranks",
        "2",
        "--training.steps",
        "100000",
        "--debug.pace_step_seconds",
        "0.3",
    )
    with local_run(tmp_path, config, *arguments) as run:
        run.until_step(1, (0,))
        (run.island(0) / "dump").touch()
        written = [run.island(0) / "logs" / f"stacks-rank-{rank}.txt" for rank in range(2)]
        run.until(lambda: all(path.exists() and "thread stacks:" in path.read_text() for path in written), 30)
        for path in written:
            training = path.read_text().partition("thread MainThread:")[2].partition("\nthread ")[0]
            assert "torchtitan_diloco/train.py" in training and "Trainer.train" in training
        assert (
            run.logs().count("time-outs:\n  lighthouse.heartbeat_timeout_s = 3 s: silence of an island") == 1
        )
        assert run.process.poll() is None and not run.events(0, "drain"), "it trains on"
