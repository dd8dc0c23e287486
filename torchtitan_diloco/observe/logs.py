"""What goes to a log, and what does not."""

import logging
import sys


def log_to_stderr() -> None:
    """As a server of its own does, which nobody else has set up."""
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    hush_clients()


def hush_clients() -> None:
    """httpx tells of every request at level INFO: some a second, for weeks."""
    for noisy in ("httpx", "httpcore"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
