"""``bytes_sent`` of a slot is what the network interface saw, and narrow codecs send as little as they promise."""

import contextlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.wan import emulated_wan, needs_root, running

pytestmark = pytest.mark.slow

SIZE = 1_500_000  # values: 6 MB in float32, six collectives of the bulk
SLOTS = 3
WIRES = ("fp32", "int8", "fp4_e3m0")
PER_MESSAGE = 2048  # bytes that a control message may take, answer and headers included

Rounds = dict[str, list[list[dict[str, Any]]]]
"""By codec and island: the slots."""


@pytest.fixture(scope="module")
def counted(tmp_path_factory: pytest.TempPathFactory) -> Rounds:
    """The same three slots with each codec, between two namespaces; the Lighthouse stands in a third."""
    folder = tmp_path_factory.mktemp("counted")
    with contextlib.ExitStack() as stack:
        wan = stack.enter_context(emulated_wan().Wan(sites=3))
        lighthouse = f"{wan.address(2)}:29510"
        serve = [sys.executable, "-m", "torchtitan_diloco", "lighthouse", "--bind", lighthouse]
        stack.enter_context(running(wan.command(2, serve), folder / "lighthouse.log"))
        islands = []
        for island in range(2):
            words = (island, f"http://{lighthouse}", folder, SIZE, SLOTS, *WIRES)
            command = [sys.executable, "-m", "tests.helpers.counted_island", *map(str, words)]
            islands.append(
                stack.enter_context(running(wan.command(island, command), folder / f"island-{island}.log"))
            )
        for island, process in enumerate(islands):
            assert process.wait(240) == 0, (folder / f"island-{island}.log").read_text()[-4000:]
    return {
        wire: [json.loads(Path(folder, f"counted-{wire}-{i}.json").read_text()) for i in range(2)]
        for wire in WIRES
    }


@needs_root
@pytest.mark.parametrize("wire", WIRES)
def test_the_interface_saw_what_the_event_of_a_slot_says(counted, wire):
    for island in counted[wire]:
        assert len(island) == SLOTS and all(slot["committed"] for slot in island)
        for slot in island:
            for said, seen in (("bytes_sent", "sent"), ("bytes_received", "received")):
                beyond = slot[seen] - slot[said]
                assert 0 <= beyond <= 0.05 * slot[said] + PER_MESSAGE * slot["messages"], (said, slot)


@needs_root
@pytest.mark.parametrize("wire, share", [("int8", 0.27), ("fp4_e3m0", 0.14)])
def test_a_narrow_codec_sends_its_share_of_what_float32_sends_for_the_same_slots(counted, wire, share):
    for island, plain in zip(counted[wire], counted["fp32"], strict=True):
        for slot, wide in zip(island, plain, strict=True):
            assert (slot["round"], slot["fragment"]) == (wide["round"], wide["fragment"])
            assert slot["bytes_sent"] <= share * wide["bytes_sent"]
            assert slot["sent"] <= share * wide["sent"] + PER_MESSAGE * slot["messages"]
