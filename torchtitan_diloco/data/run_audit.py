"""Reads the ledgers below run folders and audits them; words for people."""

import json
from collections.abc import Sequence
from pathlib import Path

from torchtitan_diloco.data.audit import Account, Report, audit
from torchtitan_diloco.data.ledger import LEDGER, READING, read_ledger, read_reading
from torchtitan_diloco.errors import UserError

RUN = "run.json"
"""Written by the launcher, which gives a run its id."""
SHOWN = 20
"""Lost ranges that are printed of one epoch."""


def audit_run(runs: Sequence[Path], *, setting: str = "RUN") -> Report:
    """Audits a run from its folders (several, when islands lie on several file systems).

    Raises UserError naming ``setting`` when there is no ledger below one of them, or one cannot be read.
    """
    if not runs:
        raise UserError(f"{setting}: no folder given; give that of a run, job.dump_folder/job.name")
    accounts, notes = [], []
    runs = list({run.resolve(): run for run in runs}.values())  # one that is given twice counts once
    _require_one_run(runs, setting)
    for run in runs:
        if not (paths := _ledgers(run)):
            problem = "has no island-*/" + LEDGER if run.is_dir() else "is no folder"
            raise UserError(
                f"{setting}: {run} {problem}; give the folder of a run that read [[data.sources]] (training.dataset keeps "
                "no ledger, nor do several islands that train on their own)"
            )
        for path in paths:
            try:
                entries, broken = read_ledger(path)
            except OSError as error:
                raise UserError(f"{setting}: cannot read {path}: {error.strerror}") from error
            if broken:
                notes.append(f"{path}: {broken} lines cannot be read and are left out")
            island = int(path.parent.name.removeprefix("island-"))
            running = _will_go_on(path.parent / "state.json")
            accounts.append(Account(island, entries, read_reading(path.parent / READING), running))
    report = audit(accounts)
    report.notes += notes
    if report.empty and notes:
        report.problems.append(
            "no island has entered the run, by those lines of the ledgers that can be read"
        )
    return report


def _require_one_run(runs: Sequence[Path], setting: str) -> None:
    """Ledgers of two runs add up to an account of neither. Trainers started by hand leave no run.json: that fits any."""
    known = {run: found for run in runs if (found := _run_id(run)) is not None}
    for run, found in known.items():
        first, expected = next(iter(known.items()))
        if found != expected:
            raise UserError(
                f"{setting}: {first} is of run {expected} and {run} of run {found}; give folders of one run"
            )


def _run_id(run: Path) -> str | None:
    try:
        found = json.loads((run / RUN).read_text(encoding="utf-8"))["run_id"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    return found if isinstance(found, str) else None


def _ledgers(run: Path) -> list[Path]:
    """Of its islands; a copy such as ``island-0.old`` is none."""
    found = sorted(run.glob(f"island-*/{LEDGER}"))
    return [path for path in found if path.parent.name.removeprefix("island-").isdecimal()]


def _will_go_on(state: Path) -> bool:
    try:
        return json.loads(state.read_text())["state"] in ("running", "resume")
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return False


def describe(report: Report) -> str:
    """A table of the epochs, then what was lost and why, then what is broken."""
    if report.empty and report.ok:
        return "no island has entered the run yet: there is nothing to audit"
    lines = [f"up to slot {report.slot}"] if report.slot >= 0 else ["no slot was committed"]
    if not report.slots:
        lines = ['no slots (semi_sync.method = "none"): a sample is consumed once its inner step is done']
    columns = ("samples", "consumed", "lost", "repeated", "in flight", "deferred", "unread")
    lines.append(f"{'source':<34} {'epoch':>5} " + " ".join(f"{c:>10}" for c in columns))
    for row in report.epochs:
        counts = (
            row.samples, row.consumed, row.lost, row.repeated, row.in_flight, row.deferred, row.unread,
        )  # fmt: skip
        name = f"{row.source} {row.path[-20:]}"
        lines.append(f"{name:<34} {row.epoch:>5} " + " ".join(f"{n:>10}" for n in counts))
    for row in report.epochs:
        for lost in row.ranges[:SHOWN]:
            lines.append(
                f"lost: epoch {row.epoch}, stream {lost.stream}, positions {lost.begin} to {lost.end - 1}: {lost.cause}"
            )
        if len(row.ranges) > SHOWN:
            lines.append(f"lost: epoch {row.epoch}: {len(row.ranges) - SHOWN} more ranges (see --json)")
    lines += [f"note: {note}" for note in report.notes]
    lines += [f"broken: {problem}" for problem in report.problems]
    lines.append("every sample was consumed at most once" if report.ok else "the account is broken")
    return "\n".join(lines)
