"""How long a joiner takes to be admitted by a hub on the loopback, from its first request on.

    python benchmarks/hub_heal.py --mb 100        # 20 seconds

Nobody trains meanwhile: this is the way in alone. ``benchmarks/heal.py`` has it within a run.
"""

import argparse
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from paired import machine, require_counts

REPO = Path(__file__).parents[1]
sys.path.insert(0, str(REPO))

from tests.helpers.hub_islands import RUN, HubIsland, together  # noqa: E402
from torchtitan_diloco.config.own import TransportConfig  # noqa: E402
from torchtitan_diloco.hub.hub import Rules  # noqa: E402
from torchtitan_diloco.hub.server import HubServer  # noqa: E402


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--mb", type=int, default=100, help="size of the state: anchor and momentum, in MB")
    parser.add_argument("--times", type=int, default=3)
    options = parser.parse_args(argv)
    require_counts(parser, options, "mb", "times")
    print(f"command: {shlex.join(['python', 'benchmarks/hub_heal.py', *argv])}")
    print(f"machine: {machine()}")
    sizes = (options.mb * 1_000_000 // 8,)
    server = HubServer("127.0.0.1", 0, RUN, Rules(lease_s=60.0))
    thread = server.in_thread()
    transport = TransportConfig(kind="hub", urls=[server.url], streams=4)
    founders = [HubIsland(i, [], 2, sizes, transport_config=transport) for i in range(2)]
    together([lambda island=island: (island.join(), island.run(1)) for island in founders])  # type: ignore[misc]
    for number in range(options.times):
        joiner = HubIsland(2 + number, [], 2, sizes, transport_config=transport)
        began = time.monotonic()
        (heal,) = joiner.join().heals
        seconds = time.monotonic() - began
        print(
            f"{heal.bytes / 1e6:.0f} MB: admitted after {seconds:.2f} s, {heal.seconds:.2f} s of them for the state"
        )
        joiner.transport.leave("done")
    for island in founders:
        island.transport.leave("done")
    server.stop()
    thread.join(10)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
