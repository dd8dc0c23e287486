"""Holds the run folder of finished islands against the reference, bit for bit. Knows file formats, nothing of our code.

Reads, per island, ``sends/`` (debug.dump_sends), the ``round`` events, and the outer part of the last checkpoint.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import safe_open
from safetensors.numpy import load_file

from tests.golden.reference import Outer, Result, Send, replay


class Mismatch(AssertionError):
    """The run and the reference differ."""


def expect(what: str, found: Any, wanted: Any) -> None:
    if found != wanted:
        raise Mismatch(f"{what}: {found!r}, the reference has {wanted!r}")


def same_bits(what: str, found: np.ndarray, wanted: np.ndarray) -> None:
    if found.dtype != wanted.dtype or found.shape != wanted.shape:
        raise Mismatch(
            f"{what}: {found.dtype} {found.shape}, the reference has {wanted.dtype} {wanted.shape}"
        )
    if found.tobytes() != wanted.tobytes():
        differ = np.flatnonzero(found.view(np.uint32) != wanted.view(np.uint32))
        first = differ[0]
        raise Mismatch(
            f"{what}: {differ.size} of {found.size} elements differ, the first at {first}: "
            f"{found[first]!r}, the reference has {wanted[first]!r}"
        )


def rounds(island: Path) -> list[dict[str, Any]]:
    """The ``round`` events of an island, in order."""
    lines = (island / "events.jsonl").read_text().splitlines()
    return [event for event in map(json.loads, lines) if event["event"] == "round"]


def read_send(path: Path, coarse: frozenset[str] = frozenset()) -> Send:
    with safe_open(path, framework="numpy") as file:
        counts = file.metadata()
    return Send(load_file(path), int(counts["steps"]), int(counts["tokens"]), coarse)


def last_checkpoint(island: Path) -> Path:
    return max((island / "checkpoint").glob("step-*"), key=lambda path: int(path.name.split("-")[1]))


def check_run(
    run: Path, islands: Sequence[int], outer: Outer, *, coarse: Mapping[int, frozenset[str]] | None = None
) -> list[Result]:
    """Raises Mismatch unless every island's run is the reference's. Returns the reference's states.

    coarse: by island, the names of tensors trained in bfloat16.
    """
    folders = {i: run / f"island-{i}" for i in islands}
    foundings = {i: read_send(folder / "sends" / "founding.safetensors") for i, folder in folders.items()}
    first = foundings[islands[0]].parameters
    for i, founding in foundings.items():
        expect(f"island {i}, founding tensors", sorted(founding.parameters), sorted(first))
        for name in sorted(first):
            same_bits(f"island {i}, founding {name}", founding.parameters[name], first[name])

    events = {i: rounds(folder) for i, folder in folders.items()}
    slots = [event["round"] for event in events[islands[0]] if event["committed"]]
    sends = {
        slot: {
            i: read_send(
                folder / "sends" / f"slot-{slot:06d}.safetensors", (coarse or {}).get(i, frozenset())
            )
            for i, folder in folders.items()
        }
        for slot in slots
    }
    results = replay(first, sorted(sends.items()), outer)
    if not results:
        raise Mismatch("no slot was committed")
    for i in islands:
        check_events(i, events[i], results, list(islands))
        check_checkpoint(i, last_checkpoint(folders[i]), results)
    return results


def check_events(
    island: int, events: list[dict[str, Any]], results: list[Result], islands: list[int]
) -> None:
    committed = [event for event in events if event["committed"]]
    expect(
        f"island {island}, committed slots",
        [event["round"] for event in committed],
        [r.slot for r in results],
    )
    for version, (event, result) in enumerate(zip(committed, results, strict=True), start=1):
        where = f"island {island}, slot {result.slot}"
        expect(f"{where}, participants", event["participants"], islands)
        expect(f"{where}, weights", tuple(event["weights"]), result.weights)
        expect(f"{where}, tokens", event["tokens"], result.tokens)
        expect(f"{where}, version", event["version"], version)
        expect(f"{where}, digest", event["digest"], result.digest)


def check_checkpoint(island: int, folder: Path, results: list[Result]) -> None:
    """The final anchor and momentum, and what is said of them."""
    tensors = load_file(folder / "outer.safetensors")
    description = json.loads((folder / "outer.json").read_text())["outer"]
    end = results[-1]
    where = f"island {island}, {folder.name}"
    wanted = {"anchor.0": end.anchor}
    if end.momentum is not None:
        wanted["momentum.0"] = end.momentum
    expect(f"{where}, tensors", sorted(tensors), sorted(wanted))
    for name, values in wanted.items():
        same_bits(f"{where}, {name}", tensors[name], values)
    expect(f"{where}, fragments", description["fragments"], [{"version": len(results), "digest": end.digest}])
    expect(f"{where}, lineage", description["lineage"], end.lineage)
    expect(
        f"{where}, committed tokens", description["tokens_total"], sum(result.tokens for result in results)
    )
