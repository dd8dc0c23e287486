"""The torchrun target: ``torchrun ... -m torchtitan_diloco.train --job.config_file FILE.toml [--section.key value ...]``."""

import logging
import os
import shlex
import sys
import uuid
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from torchtitan_diloco.config.load import Resolved, load_config, take_config_file
from torchtitan_diloco.config.reach import await_lighthouse
from torchtitan_diloco.config.timeouts import timeouts
from torchtitan_diloco.config.translate import island_folder
from torchtitan_diloco.errors import UserError
from torchtitan_diloco.island.lease import Held, Lease
from torchtitan_diloco.island.misfortune import misfortune
from torchtitan_diloco.observe.events import INCARNATION, Trace
from torchtitan_diloco.observe.logs import hush_clients
from torchtitan_diloco.observe.reading import read_state
from torchtitan_diloco.observe.stacks import StackWriter
from torchtitan_diloco.process import die_with_parent

logger = logging.getLogger(__name__)

TORCHRUN = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""What torchrun says to every process that it starts, and torch.distributed and TorchTitan ask for."""


def prepare_environment() -> None:
    """One setting, one place: TorchFT's variables would beat what the TOML says."""
    for name in [name for name in os.environ if name.startswith("TORCHFT_")]:
        del os.environ[name]
    # Without a launcher there is none; the one made up here is also that of an error before training.
    os.environ.setdefault(INCARNATION, uuid.uuid4().hex[:12])
    os.environ.setdefault("RUST_LOG", "warn")  # TorchFT's own logger; at "info" it writes a line per quorum


def require_torchrun(arguments: Sequence[str]) -> None:
    """Raises UserError where nothing says which rank of which world this process is."""
    missing = [name for name in TORCHRUN if name not in os.environ]
    if missing:
        command = shlex.join(
            ["torchrun", "--nproc_per_node", "1", "-m", "torchtitan_diloco.train", *arguments]
        )
        raise UserError(
            f"this process is no rank of a job ({', '.join(missing)} not set): start it with `{command}`, or a whole run on "
            "this machine with `torchtitan-diloco run FILE.toml`"
        )


def find_lighthouse(resolved: Resolved) -> None:
    """Raises UserError where an island that has not finished would look for its Lighthouse in vain, minutes later.

    Once for the island: on its first rank, which is the one to talk to the Lighthouse.
    """
    state = read_state(island_folder(resolved.config))
    if int(os.environ["RANK"]) == 0 and (state is None or state.state != "done"):
        await_lighthouse(resolved.config, say)


def hold(resolved: Resolved) -> Lease | None:
    """The island is this start's until it is released; on its first rank. Raises Held while another start of it lives."""
    if int(os.environ["RANK"]) != 0:
        return None
    config = resolved.config
    lease = Lease(Path(island_folder(config)), config.island.id, os.environ[INCARNATION], lost)
    lease.take(say)
    return lease


def lost(reason: str) -> None:
    """Another start trains in this folder: write nothing more, and let torchrun end the other ranks."""
    say(f"error: {reason}; this start ends")
    os._exit(2)


def say(words: str) -> None:
    sys.stderr.write(f"{words}\n")
    sys.stderr.flush()


def report(error: Exception, resolved: Resolved | None, kind: str, message: str) -> None:
    """Say what is wrong, once and durably. kind: of the `error` event; "config" is an error that another start would meet."""
    # TorchTitan's trainer left the stack trace there, for torchrun to repeat below our sentence.
    if trace_file := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        Path(trace_file).unlink(missing_ok=True)
    first = int(os.environ.get("RANK", "0")) == 0
    if first or kind != "config":  # all ranks meet an error of the configuration, a full disk perhaps one
        say(f"error: {message}")
    if first and resolved is not None and not isinstance(error, Held):  # its folder is another's
        with suppress(OSError):  # of a folder that cannot be written
            trace = Trace(
                Path(island_folder(resolved.config)),
                resolved.config.island.id,
                os.environ[INCARNATION],
            )
            trace.event("error", kind=kind, message=message)
            if kind == "config":
                trace.state("fatal", message)
            trace.close()


def end(code: int) -> NoReturn:
    """End the process now: threads still inside torch or gRPC must not turn a clear end into a hang or an abort."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def train(trainer_config: Any) -> None:
    """Build and run the trainer as TorchTitan's own entry point does."""
    import torch
    from torchtitan.observability import structured_logger
    from torchtitan.tools.logging import init_logger

    init_logger()
    logging.getLogger("torchtitan_diloco").setLevel(logging.INFO)
    hush_clients()
    structured_logger.init_structured_logger(
        source="training",
        output_dir=trainer_config.dump_folder,
        enable=trainer_config.debug.enable_structured_logging,
    )
    trainer = trainer_config.build()
    try:
        trainer.train()
    finally:
        trainer.close()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def main(argv: Sequence[str] | None = None) -> None:
    die_with_parent()
    prepare_environment()
    resolved, lease, code = None, None, 0
    try:
        arguments = list(sys.argv[1:] if argv is None else argv)
        path, overrides = take_config_file(arguments)
        loaded = load_config(path, overrides).with_model().one_island()
        require_torchrun(arguments)
        resolved = loaded
        lease = hold(loaded)
        StackWriter(Path(island_folder(loaded.config)), int(os.environ["RANK"])).start()
        find_lighthouse(loaded)
        if lease is not None:
            say("\n  ".join(["time-outs:", *timeouts(loaded.config)]))
        from torchtitan_diloco.configure import trainer_config

        train(trainer_config(resolved))
    except UserError as error:
        report(error, resolved, "config", str(error))
        code = 2
    except Exception as error:
        what = misfortune(error, island_folder(resolved.config)) if resolved is not None else None
        if what is None:
            raise
        report(error, resolved, what.kind, what.sentence)
        code = 1
    finally:
        if lease is not None:
            lease.release()
    end(code)


if __name__ == "__main__":
    main()
