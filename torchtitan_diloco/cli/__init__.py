"""Command line ``torchtitan-diloco COMMAND ...``; each command is a module here with ``main(argv) -> int``."""

import importlib
import sys
from collections.abc import Sequence
from typing import NoReturn

from torchtitan_diloco.cli.output import dispensable_output, to_nowhere
from torchtitan_diloco.cli.stop import stop_requests
from torchtitan_diloco.errors import Resumable, UserError

COMMANDS = {
    "run": "start a Lighthouse and several islands on this machine and train",
    "lighthouse": "run the Lighthouse that islands of a run meet at",
    "syncer": "run the hub that islands of a run dial when they cannot reach one another",
    "validate": "check configuration files and print them resolved, with the origin of each value",
    "preflight": "try out what an island dials and what has to reach it, before it takes GPUs",
    "chaos": "run islands on this machine, have faults befall them, and say what that has cost",
    "data": "prepare, verify and inspect corpora, and audit what a run did with them",
}
"""Command -> what it does. Only the chosen command's module is imported."""

DRAINING = frozenset({"run", "chaos"})
"""Commands that look at `stop.stop_requests` themselves, and go on when nobody reads their output any more."""

EXIT_DONE, EXIT_FAILED, EXIT_USAGE, EXIT_RESUMABLE, EXIT_INTERRUPTED = 0, 1, 2, 75, 130


def usage() -> str:
    """The text of ``--help``."""
    width = max(map(len, COMMANDS))
    listed = "\n".join(f"  {name:<{width}}  {does}" for name, does in COMMANDS.items())
    return f"usage: torchtitan-diloco COMMAND ...\n\n{listed}\n\ntorchtitan-diloco COMMAND --help says more."


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Run a command and exit: 0 done, 2 wrong usage or configuration, 75 stopped early and resumable, 1 failure."""
    sys.exit(dispatch(list(sys.argv[1:] if argv is None else argv)))


def dispatch(argv: list[str]) -> int:
    """As `main`, returning the exit code.

    Any other exception is a defect and passes through: the interpreter shows its stack trace and exits 1. So does the
    SystemExit of a command's own argument parser.
    """
    if argv and argv[0] in ("-h", "--help"):
        print(usage())
        return EXIT_DONE
    if not argv or argv[0] not in COMMANDS:
        wrong = f'there is no command "{argv[0]}"' if argv else "a command is missing"
        print(f"error: {wrong}\n{usage()}", file=sys.stderr)
        return EXIT_USAGE
    if argv[0] in DRAINING:
        stop_requests()
        with dispensable_output():
            return _command(argv)
    try:
        code = _command(argv)
        if sys.stdout is not None:
            sys.stdout.flush()
        return code
    except BrokenPipeError:
        # The reader has gone (`... | head`); what is buffered would make the interpreter complain at its end.
        to_nowhere(sys.stdout)
        return EXIT_FAILED


def _command(argv: list[str]) -> int:
    try:
        command = importlib.import_module(f"torchtitan_diloco.cli.{argv[0]}")
        return int(command.main(argv[1:]))
    except UserError as e:
        print("\n".join(f"error: {line}" for line in str(e).splitlines()), file=sys.stderr)
        return EXIT_USAGE
    except Resumable as e:
        print(f"stopped early, can be continued: {e}", file=sys.stderr)
        return EXIT_RESUMABLE
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
