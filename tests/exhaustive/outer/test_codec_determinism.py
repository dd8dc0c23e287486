"""The same bytes decode to the same bits, and the same values encode to the same bytes, on any CPU and thread count."""

import functools
import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.helpers.codecs import WIRES, awkward, heavy_tailed, name_of
from torchtitan_diloco.outer.codec import make_codec

NUMEL = 140_001  # a full piece and a partial one


@functools.cache
def digests() -> str:
    """One line a codec and rounding: SHA-256 of its bytes and of what they decode to."""
    lines = []
    for wire in WIRES:
        for rounding in ("nearest", "stochastic"):
            plan = make_codec(wire.name, block=wire.block, density=wire.density, rounding=rounding).prepare(
                NUMEL
            )
            buffer, out = torch.empty(plan.nbytes, dtype=torch.uint8), torch.empty(NUMEL)
            # The total has values to be rounded at every place, and both signs of zero.
            total = heavy_tailed(NUMEL, 3)
            for seed, make in enumerate((heavy_tailed, awkward)):
                plan.encode(make(NUMEL, seed).clamp(-1e38, 1e38), buffer, seed)
                plan.decode(buffer, out)
                plan.decode_add(buffer, 1 / 3, total)
                both = [
                    hashlib.sha256(t.view(torch.uint8).numpy().tobytes()).hexdigest()
                    for t in (buffer, out, total)
                ]
                lines.append(f"{name_of(wire)} {rounding} {' '.join(both)}")
    return "\n".join(lines)


def digests_in(capability: str, threads: int) -> str:
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": str(threads),
        "PYTHONPATH": str(Path(__file__).parents[3]),
    }
    environment["ATEN_CPU_CAPABILITY"] = capability
    environment["OMP_WAIT_POLICY"] = "passive"  # two threads on a busy core would spin for most of the time
    code = (
        "import torch; from tests.exhaustive.outer.test_codec_determinism import digests; "
        "print(torch.backends.cpu.get_cpu_capability(), torch.get_num_threads()); print(digests())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=50
    )
    assert done.returncode == 0, done.stderr
    first, rest = done.stdout.split("\n", 1)
    assert first in (f"{capability.upper()} {threads}", f"NO AVX {threads}"), first
    return rest.strip()


@pytest.mark.parametrize("capability, threads", [("default", 1), ("avx2", 2)])
def test_bytes_and_bits_are_those_of_every_other_cpu(capability, threads):
    assert digests_in(capability, threads) == digests()


@pytest.mark.parametrize("wire", WIRES, ids=name_of)
def test_bytes_and_bits_do_not_depend_on_the_size_of_the_pieces(wire):
    coder = make_codec(wire.name, block=wire.block, density=wire.density)
    values, results = heavy_tailed(50_001), []
    for cached_values in (4096, 10_000, 1 << 22):
        plan = coder.prepare(50_001, cached_values=cached_values)
        buffer, out = torch.empty(plan.nbytes, dtype=torch.uint8), torch.empty(50_001)
        plan.encode(values, buffer)
        plan.decode(buffer, out)
        results.append((buffer, out))
    for buffer, out in results[1:]:
        assert torch.equal(buffer, results[0][0]) and torch.equal(out, results[0][1])


@pytest.mark.parametrize("wire", [w for w in WIRES if w.name not in ("fp32", "bf16")], ids=name_of)
def test_bits_do_not_depend_on_whether_the_process_keeps_subnormals(wire):
    """A process may flush them to zero, torch.set_flush_denormal; the codec makes none of its own."""
    coder = make_codec(wire.name, block=wire.block, density=wire.density)
    values, results = awkward(50_001), []
    for flush in (False, True):
        plan = coder.prepare(50_001)
        buffer, out = torch.empty(plan.nbytes, dtype=torch.uint8), torch.empty(50_001)
        assert torch.set_flush_denormal(flush)
        try:
            plan.encode(values, buffer)
            plan.decode(buffer, out)
        finally:
            torch.set_flush_denormal(False)
        results.append((buffer, out))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1].view(torch.int32), results[1][1].view(torch.int32))
