"""The benchmark of codecs' losses: its arms are settings that exist, and its arithmetic."""

from pathlib import Path

import pytest

from torchtitan_diloco.config.load import load_config

REPO = Path(__file__).parents[2]


@pytest.fixture
def benchmark(monkeypatch):
    monkeypatch.syspath_prepend(str(REPO / "benchmarks"))
    import quality

    return quality


def test_every_arm_is_a_setting_of_the_quickstart(benchmark):
    for settings in benchmark.ARMS.values():
        load_config(REPO / "train_configs" / "quickstart.toml", settings)


def test_a_missing_loss_is_no_result(benchmark):
    assert benchmark.final_loss([4.0, 2.0, 3.0, 3.0], islands=2, steps=2) == 3.0
    with pytest.raises(ValueError, match="3 losses of 2 islands in 2 steps"):
        benchmark.final_loss([4.0, 2.0, 3.0], islands=2, steps=2)


def test_the_table_compares_seed_by_seed_and_shows_the_worst(benchmark):
    lines = benchmark.table({"fp32": [4.0, 2.0], "int4": [4.08, 1.99]}).splitlines()
    assert lines[0] == "| Codec | seed 1 | seed 2 | against fp32, mean (worst) |"
    assert lines[1] == "|---|---|---|---|"
    assert lines[3] == "| int4 | 4.0800 | 1.9900 | +0.75 % (+2.00 %) |"


def test_a_wrong_flag_is_refused(benchmark):
    with pytest.raises(SystemExit) as stopped:
        benchmark.parse(["--seeds", "0"])
    assert stopped.value.code == 2
