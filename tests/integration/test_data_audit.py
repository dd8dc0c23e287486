"""The audit of a real run."""

import json

from torchtitan_diloco.cli.data import main


def test_audit_of_a_real_run_accounts_for_every_sample(unequal_islands_run, capsys):
    """Two slots of seven steps: two sequences a step and rank, on three ranks."""
    run = unequal_islands_run
    assert main(["audit", str(run.folder)]) == 0
    assert "every sample was consumed at most once" in capsys.readouterr().out
    assert main(["audit", str(run.folder), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    (epoch,) = report["epochs"]
    assert report["slot"] == 1
    assert epoch["consumed"] == 14 * 2 * 3
    assert epoch["consumed"] + epoch["unread"] == epoch["samples"]
    assert report["problems"] == [] and report["notes"] == []
