"""What a preflight says of a spool's folder, and how probes share their time."""

import os
import time
from pathlib import Path

import pytest

from torchtitan_diloco.config.schema import RunConfig
from torchtitan_diloco.errors import UserError
from torchtitan_diloco.preflight.network import network_rows
from torchtitan_diloco.preflight.rows import Probe, Row, look


def rows_of(folder: Path | str) -> dict[str, Row]:
    config = RunConfig()
    config.transport.kind, config.transport.dir, config.semi_sync.num_islands = "spool", str(folder), 2
    return {row.name: row for row in network_rows(config, config)}


def test_a_folder_that_can_be_written_is_left_as_it_was(tmp_path: Path) -> None:
    rows = rows_of(tmp_path / "spool")
    assert rows["spool"].outcome == "ok" and list((tmp_path / "spool").iterdir()) == []
    assert (
        rows["spool: mirror"].outcome == "warn" and "nothing has ever come down" in rows["spool: mirror"].seen
    )
    assert "scripts/spool_mirror.sh" in rows["spool: mirror"].remedy


def test_the_mirrors_last_sign_is_told(tmp_path: Path) -> None:
    down = tmp_path / "down" / "run"
    down.mkdir(parents=True)
    (down / "a.json").write_text("{}")
    assert rows_of(tmp_path)["spool: mirror"].outcome == "ok"
    long_ago = time.time() - 7200
    for path in (down / "a.json", down, down.parent):
        os.utime(path, (long_ago, long_ago))
    row = rows_of(tmp_path)["spool: mirror"]
    assert row.outcome == "warn" and row.seen.startswith("the last sign of it is 720")
    now = time.time()
    os.utime(down / "a.json", (now, now))
    assert rows_of(tmp_path)["spool: mirror"].outcome == "ok"


def test_a_folder_that_cannot_be_fails_with_the_setting(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    row = rows_of(tmp_path / "file")["spool"]
    assert row.outcome == "fail" and "transport.dir" in row.remedy
    assert rows_of("")["spool"].seen == "transport.dir is empty"


def test_a_probe_that_hangs_or_refuses_is_a_row_and_holds_up_nobody() -> None:
    def refuse(until: float) -> list[Row]:
        raise UserError("transport.ca_file: it is no certificate; give one")

    hang = Probe("a", "out", "x", "open it", lambda until: time.sleep(30) or [])
    refused = Probe("b", "out", "y", "its own", refuse)
    fine = Probe("c", "in", "z", "", lambda until: [Row("c", "in", "z", "ok", "fine")])
    began = time.monotonic()
    rows = look([hang, refused, fine], began + 1.0)
    assert time.monotonic() - began < 3
    assert [(r.name, r.outcome, r.seen, r.remedy) for r in rows] == [
        ("a", "fail", "no answer within 1 s", "open it"),
        ("b", "fail", "transport.ca_file: it is no certificate", "give one"),
        ("c", "ok", "fine", ""),
    ]


def test_a_defect_in_a_probe_is_no_row() -> None:
    def broken(until: float) -> list[Row]:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        look([Probe("a", "out", "x", "", broken)], time.monotonic() + 5)
