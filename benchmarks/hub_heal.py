"""How long a joiner takes to be admitted by a hub on the loopback.

PYTHONPATH=. python benchmarks/hub_heal.py --mb 100
"""

import argparse
import time

from tests.helpers.hub_islands import RUN, HubIsland, together
from torchtitan_diloco.config.own import TransportConfig
from torchtitan_diloco.hub.hub import Rules
from torchtitan_diloco.hub.server import HubServer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mb", type=int, default=100, help="size of the state: anchor and momentum, in MB")
    parser.add_argument("--times", type=int, default=3)
    options = parser.parse_args()
    sizes = (options.mb * 1_000_000 // 8,)
    server = HubServer("127.0.0.1", 0, RUN, Rules(lease_s=60.0))
    thread = server.in_thread()
    transport = TransportConfig(kind="hub", urls=[server.url], streams=4)
    founders = [HubIsland(i, [], 2, sizes, transport_config=transport) for i in range(2)]
    together([lambda island=island: (island.join(), island.run(1)) for island in founders])
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


if __name__ == "__main__":
    main()
