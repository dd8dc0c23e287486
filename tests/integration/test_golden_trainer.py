"""A run of the shipped configuration through TorchTitan's trainer, reproduced by the NumPy reference bit for bit."""

import pytest

from tests.golden.compare import check_run, read_send, rounds
from tests.golden.reference import Outer

QUICKSTART = Outer(lr=0.7, momentum=0.9, nesterov=True, weight="tokens")


@pytest.mark.timeout(300)
def test_reference_reproduces_unequal_islands_of_the_quickstart(unequal_islands_run):
    run = unequal_islands_run
    results = check_run(run.folder, run.islands, QUICKSTART)
    assert [result.slot for result in results] == [0, 1]
    assert results[-1].anchor.size > 1_000_000
    # Twice the ranks are twice the tokens in as many steps, hence four times the weight.
    assert results[0].weights == (0.8, 0.2)
    for island in run.islands:
        assert (run.island(island) / "checkpoint" / "step-14" / "outer.safetensors").is_file()
        sent = read_send(run.island(island) / "sends" / "slot-000001.safetensors")
        assert (sent.steps, sent.tokens) == (7, 7 * 2 * 64 * (2 - island))
        assert all(event["committed"] for event in rounds(run.island(island)))
