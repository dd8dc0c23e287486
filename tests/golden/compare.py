"""Holds the run folder of finished islands against the reference, bit for bit. Knows file formats, nothing of our code.

Reads, per island, ``sends/`` (debug.dump_sends), the ``round`` events, and the outer part of the last checkpoint; where the
island has recorded them, its parameters before and after the exchange of every step too.
"""

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import safe_open
from safetensors.numpy import load_file

from tests.golden.reference import (
    ROWS,
    Outer,
    Result,
    Send,
    Tensors,
    Turn,
    flatten,
    mix,
    place,
    replay,
    schedule,
)


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
        found, wanted = np.ravel(found), np.ravel(wanted)
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
        about = file.metadata()
    return Send(load_file(path), int(about["steps"]), int(about["tokens"]), int(about["fragment"]), coarse)


def last_checkpoint(island: Path) -> Path:
    return max((island / "checkpoint").glob("step-*"), key=lambda path: int(path.name.split("-")[1]))


@dataclass(frozen=True)
class Paces:
    """What the reference must be told of the islands to say when each sends what, by island.

    skipped: inner steps that an island did not make, since it went on from another's state, which was ahead.
    """

    sync_every: Mapping[int, int]
    steps: Mapping[int, int]
    tokens_per_step: Mapping[int, int]
    skipped: Mapping[int, Collection[int]] = field(default_factory=dict)


def check_run(
    run: Path,
    islands: Sequence[int],
    outer: Outer,
    *,
    paces: Paces | None = None,
    coarse: Mapping[int, frozenset[str]] | None = None,
    failed: Collection[int] = (),
    healed: Collection[tuple[int, int]] = (),
) -> list[Result]:
    """Raises Mismatch unless every island's run is the reference's. Returns the reference's states.

    paces: also hold the moments of sends and applies, and the islands' own parameters, against the reference's. coarse: by
    island, the names of tensors trained in bfloat16. failed: slots that must have failed; of the others, those in which
    somebody had made a step must have committed. healed: (island, slot) where the island must have taken the slot's result
    from another; not the first island.
    """
    folders = {i: run / f"island-{i}" for i in islands}
    rounded = {i: (coarse or {}).get(i, frozenset()) for i in islands}
    foundings = {i: load_file(folder / "sends" / "founding.safetensors") for i, folder in folders.items()}
    first = foundings[islands[0]]
    for i, founding in foundings.items():
        expect(f"island {i}, founding tensors", sorted(founding), sorted(first))
        for name in sorted(first):
            same_bits(f"island {i}, founding {name}", founding[name], first[name])

    events = {i: rounds(folder) for i, folder in folders.items()}
    numbers = sorted(int(p.stem[5:]) for p in (folders[islands[0]] / "sends").glob("slot-*"))
    sends = {
        slot: {
            i: read_send(folder / "sends" / f"slot-{slot:06d}.safetensors", rounded[i])
            for i, folder in folders.items()
        }
        for slot in numbers
    }
    parts = partition(first, sends, outer.fragments)
    slots = [event["round"] for event in events[islands[0]] if event["committed"]]
    with_news = [slot for slot, sent in sends.items() if any(send.steps > 0 for send in sent.values())]
    expect("committed slots", slots, [slot for slot in with_news if slot not in failed])
    results = replay(
        [flatten({name: first[name] for name in part}) for part in parts],
        [(slot, sends[slot]) for slot in slots],
        outer,
        healed,
    )
    if not results:
        raise Mismatch("no slot was committed")
    for i in islands:
        expect(f"island {i}, slots", [event["round"] for event in events[i]], numbers)
        taken = {slot for island, slot in healed if island == i}
        check_events(i, events[i], results, taken)
        check_checkpoint(i, last_checkpoint(folders[i]), results, outer)
        if paces is not None:
            counts = {slot: sent[i] for slot, sent in sends.items()}
            check_counts(i, counts, results, outer, paces)
            recorded = load_file(folders[i] / "parameters.safetensors")
            check_parameters(
                i,
                recorded,
                counts,
                parts,
                results,
                schedule(paces.sync_every[i], paces.steps[i], outer),
                {result.slot: 0.0 if result.slot in taken else outer.alpha for result in results},
                [s for s in range(1, paces.steps[i] + 1) if s not in paces.skipped.get(i, ())],
            )
    return results


def partition(founding: Tensors, sends: Mapping[int, Mapping[int, Send]], fragments: int) -> list[list[str]]:
    """The names of each fragment's tensors, as they were sent: every one in exactly one fragment, on all islands alike."""
    parts: dict[int, list[str]] = {}
    for slot, sent in sends.items():
        for i, send in sent.items():
            expect(f"island {i}, slot {slot}, fragment", send.fragment, slot % fragments)
            names = parts.setdefault(send.fragment, sorted(send.parameters))
            expect(f"island {i}, slot {slot}, tensors", sorted(send.parameters), names)
    expect("fragments that were sent", sorted(parts), list(range(fragments)))
    expect("tensors that were sent", sorted(n for p in parts.values() for n in p), sorted(founding))
    return [parts[f] for f in range(fragments)]


def check_events(
    island: int, events: list[dict[str, Any]], results: list[Result], taken: Collection[int]
) -> None:
    """taken: slots whose result the island took from another."""
    settled = [event for event in events if event["committed"] or event["round"] in taken]
    expect(
        f"island {island}, committed slots",
        [event["round"] for event in settled],
        [r.slot for r in results],
    )
    for event, result in zip(settled, results, strict=True):
        where = f"island {island}, slot {result.slot}"
        expect(f"{where}, taken from another", not event["committed"], result.slot in taken)
        expect(f"{where}, fragment", event["fragment"], result.fragment)
        expect(f"{where}, version", event["version"], result.version)
        expect(f"{where}, digest", event["digest"], result.digest)
        if result.slot in taken:
            continue
        expect(f"{where}, participants", tuple(event["participants"]), result.participants)
        expect(f"{where}, weights", tuple(event["weights"]), result.weights)
        expect(f"{where}, tokens", event["tokens"], result.tokens)


def check_checkpoint(island: int, folder: Path, results: list[Result], outer: Outer) -> None:
    """The final anchors, momenta and residuals, and what is said of them."""
    fragments = outer.fragments
    tensors = load_file(folder / "outer.safetensors")
    description = json.loads((folder / "outer.json").read_text())["outer"]
    where = f"island {island}, {folder.name}"
    last = {result.fragment: result for result in results}
    expect(f"{where}, committed fragments", sorted(last), list(range(fragments)))
    wanted = {f"anchor.{f}": last[f].anchor for f in last}
    wanted |= {f"momentum.{f}": m for f in last if (m := last[f].momentum) is not None}
    if outer.feedback:
        nothing = {f: np.zeros_like(last[f].anchor) for f in last}
        wanted |= {f"residual.{f}": last[f].residuals.get(island, nothing[f]) for f in last}
        wanted |= {
            f"residual.{f}[{start}:{stop}]": values
            for f in last
            for (start, stop), (owner, values) in last[f].owned.items()
            if owner == island
        }
    expect(f"{where}, tensors", sorted(tensors), sorted(wanted))
    for name, values in wanted.items():
        same_bits(f"{where}, {name}", tensors[name], values)
    described = [
        {
            "version": last[f].version,
            "digest": last[f].digest,
            "lineage": last[f].lineage,
            "tokens": sum(result.tokens for result in results if result.fragment == f),
            "trail": "".join(result.lineage[:8] for result in results if result.fragment == f)[-8 * 512 :],
        }
        for f in range(fragments)
    ]
    expect(f"{where}, fragments", description["fragments"], described)


def check_counts(
    island: int, sends: Mapping[int, Send], results: list[Result], outer: Outer, paces: Paces
) -> None:
    """Steps and tokens of every send: those since the fragment was last applied, which restarts the count."""
    committed = {result.slot for result in results}
    skipped = paces.skipped.get(island, ())
    since = [0] * outer.fragments
    for turn in schedule(paces.sync_every[island], paces.steps[island], outer):
        expect(f"island {island}, slot {turn.slot} was sent", turn.slot in sends, True)
        made = range(since[turn.fragment] + 1, turn.sent + 1)
        send, steps = sends[turn.slot], sum(step not in skipped for step in made)
        where = f"island {island}, slot {turn.slot}"
        expect(f"{where}, steps", send.steps, steps)
        expect(f"{where}, tokens", send.tokens, steps * paces.tokens_per_step[island])
        if turn.slot in committed:
            since[turn.fragment] = turn.applied
    expect(f"island {island}, number of slots", len(sends), turn.slot + 1)


def check_parameters(
    island: int,
    recorded: Tensors,
    sends: Mapping[int, Send],
    parts: list[list[str]],
    results: list[Result],
    turns: Sequence[Turn],
    alphas: Mapping[int, float],
    made: list[int],
) -> None:
    """What the island trained: changed by nothing but the inner optimizer and the applies, each exactly when it is due.

    alphas: by committed slot. made: the island's inner steps.
    """
    outcome = {result.slot: result for result in results}
    coarse = next(iter(sends.values())).coarse
    names = sorted({name.split(" ", 2)[2] for name in recorded})
    steps = sorted({int(name.split(" ", 2)[1]) for name in recorded})

    def apply(turn: Turn) -> None:
        if turn.slot not in outcome:
            return
        anchor, offset = outcome[turn.slot].anchor, 0
        for piece in sorted(parts[turn.fragment], key=place):
            values = rows(local, piece)
            new = anchor[offset : offset + values.size].reshape(values.shape)
            offset += values.size
            values[...] = mix(values, new, alphas[turn.slot], place(piece)[0] in coarse)

    expect(f"island {island}, steps", steps, made)
    for step in steps:
        local = {name: recorded[f"before {step} {name}"].copy() for name in names}
        for turn in (t for t in turns if t.applied == step and t.sent < step):
            apply(turn)
        for turn in (t for t in turns if t.sent == step):
            for piece, sent in sends[turn.slot].parameters.items():
                same_bits(f"island {island}, step {step}, sent {piece}", sent, rows(local, piece))
            if turn.applied == step:
                apply(turn)
        for name in names:
            same_bits(
                f"island {island}, after step {step}, {name}", recorded[f"after {step} {name}"], local[name]
            )


def rows(tensors: Mapping[str, np.ndarray], piece: str) -> np.ndarray:
    """The tensor, or the view of its rows, that a piece's name means."""
    found = ROWS.match(piece)
    return tensors[found[1]][int(found[2]) : int(found[3])] if found else tensors[piece]
