"""Runs a few islands over a real hub: its service on loopback, the islands' real methods in threads of this process."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from tests.golden.compare import check_run
from tests.golden.island import Case, Island, Plan, paces, slots_of
from tests.golden.reference import Result
from tests.helpers.hub_islands import together
from torchtitan_diloco.config.own import IslandConfig, LighthouseConfig, TransportConfig
from torchtitan_diloco.exchange.deal import Merge
from torchtitan_diloco.exchange.hub import HubTransport
from torchtitan_diloco.hub.hub import Rules
from torchtitan_diloco.hub.server import HubServer
from torchtitan_diloco.hub.worker_process import Crewed


def settings_of(case: Case, plan: Plan, islands: int) -> dict[str, Any]:
    """What islands agree on, flat, as far as a hub looks at it."""
    config = asdict(case.config(plan, islands))
    flat = {f"semi_sync.{key}": value for key, value in config.items() if not isinstance(value, dict)}
    for table in ("outer", "merge", "codec"):
        flat |= {f"semi_sync.{table}.{key}": value for key, value in config[table].items()}
    every, steps = case.run or (plan.sync_every, plan.steps)
    return flat | {"semi_sync.sync_every": every, "training.steps": steps}


@dataclass(frozen=True)
class HubRun:
    """A run and what must come of it: see ``check_run``. All plans must have the same number of slots."""

    case: Case
    plans: Sequence[Plan]
    workers: int = 0

    def check(self, folder: Path) -> list[Result]:
        """Do it below ``folder``; raises Mismatch unless it is the reference's, local parameters included."""
        count = len(self.plans)
        settings = settings_of(self.case, self.plans[0], count)
        server = HubServer("127.0.0.1", 0, "golden", Rules(), folder / "syncer", crewed=Crewed(self.workers))
        serving = server.in_thread()

        def transport(island: int, merge: Merge) -> HubTransport:
            config = TransportConfig(kind="hub", urls=[server.url], streams=2)
            return HubTransport(IslandConfig(id=island), LighthouseConfig(), config, merge)

        try:
            islands = [
                Island(
                    i,
                    plan,
                    self.case,
                    folder,
                    lambda merge, i=i: transport(i, merge),
                    islands=count,
                    settings=settings,
                )  # type: ignore[misc]
                for i, plan in enumerate(self.plans)
            ]
            together([island.join for island in islands])
            together([island.train for island in islands])
            for island in islands:
                island.finish()
        finally:
            server.stop()
            serving.join(10)
        outer = self.case.outer(islands=count, slots=slots_of(self.case, self.plans[0]))
        return check_run(folder, range(count), replace(outer, hub=True), paces=paces(self.plans))
