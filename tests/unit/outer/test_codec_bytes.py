"""The bytes of every codec: by hand, by formula, and against the reference written in NumPy."""

import numpy as np
import pytest
import torch

from tests.golden import codec_reference as reference
from tests.helpers.codecs import STOCHASTIC, WIRES, awkward, check_wire, gaussian, heavy_tailed, name_of
from torchtitan_diloco.outer.codec import make_codec, noise_seed

SPIKES = torch.zeros(4096)
SPIKES[[5, 7, 4095]] = torch.tensor([-3.0, 1.0, 1.5])

BY_HAND = {
    # 1, -2, a tie (goes to the even neighbour), pi
    "bf16": (make_codec("bf16"), [1.0, -2.0, 1 + 2**-8, 3.1415927], "803f 00c0 803f 4940", [1, -2, 1, 3.140625]),
    # scales 1 and 3 / 127 rounded up to 194 * 2^-13; 0.5 and 1.5 are ties
    "int8": (make_codec("int8", block=4), [127, -1, 0.5, 1.5, 3], "803f c23c 7fff0002 7f", [127, -1, 0, 2, 127 * 194 / 8192]),
    # scales 1 and 2; codes 7, -7, 2 (a tie), -1, then 7 alone in its byte
    "int4": (make_codec("int4", block=4), [7, -7, 2.5, -1, 14], "803f 0040 97 f2 07", [7, -7, 2, -1, 14]),
    # scales 2^0 and 2^2 (3 is halfway, and goes up); 0.75 is halfway too
    "fp4": (make_codec("fp4_e3m0", block=4), [1, -0.5, 0.02, 0.75, -3], "7f 81 e7 71 0f", [1, -0.5, 2**-6, 1, -4]),
    # fp4 below its smallest level, 2^-6: halfway goes up
    "fp4 zero": (make_codec("fp4_e3m0", block=4), [1, 2**-7, 0.0078, -0.0078], "7f 17 80", [1, 2**-6, 0, 0]),
    # -3 and 1.5 at places 5 and 4095
    "topk": (make_codec("topk", density=2 / 4096), SPIKES.tolist(), "c23c 813f 05f0ff", None),
}  # fmt: skip


@pytest.mark.parametrize("case", BY_HAND)
def test_bytes_worked_out_by_hand(case):
    coder, values, expected, decoded = BY_HAND[case]
    plan = coder.prepare(len(values))
    buffer, out = torch.empty(plan.nbytes, dtype=torch.uint8), torch.empty(len(values))
    plan.encode(torch.tensor(values, dtype=torch.float32), buffer)
    assert bytes(buffer.tolist()) == bytes.fromhex(expected)
    plan.decode(buffer, out)
    if decoded is None:
        decoded = [0.0] * 4096
        decoded[5], decoded[4095] = -127 * 194 / 8192, 63 * 194 / 8192
    assert out.tolist() == decoded


def test_fp32_bytes_are_the_values():
    values = awkward(1000)
    plan = make_codec("fp32").prepare(1000)
    buffer, out = torch.empty(4000, dtype=torch.uint8), torch.empty(1000)
    plan.encode(values, buffer)
    plan.decode(buffer, out)
    assert torch.equal(buffer, values.view(torch.uint8)) and torch.equal(out, values)


@pytest.mark.parametrize("wire", WIRES, ids=name_of)
@pytest.mark.parametrize("numel", [0, 1, 2, 63, 64, 65, 4095, 4097, 8192, 20001])
def test_bytes_and_decoded_bits_are_the_references(wire, numel):
    for make in (gaussian, awkward):
        values = make(numel, seed=numel)
        if wire.name == "bf16":  # the reference leaves out what rounds to infinity
            values = values.clamp(-3.38e38, 3.38e38)
        check_wire(wire, values)


@pytest.mark.parametrize("wire", STOCHASTIC, ids=name_of)
@pytest.mark.parametrize("numel", [1, 65, 4097, 20001])
def test_with_noise_bytes_and_decoded_bits_are_the_references(wire, numel):
    seed = noise_seed("run", 3, 1, 2)
    assert seed == reference.noise_seed("run", 3, 1, 2)
    for make in (gaussian, awkward):
        values = make(numel, seed=numel)
        if wire.name == "bf16":
            values = values.clamp(-3.38e38, 3.38e38)
        check_wire(wire, values, seed)


@pytest.mark.parametrize(
    "wire, numel, nbytes",
    [
        ("fp32", 1001, 4004),
        ("bf16", 1001, 2002),
        ("int8", 1001, 2 * 16 + 1001),
        ("int4", 1001, 2 * 16 + 501),
        ("fp4_e3m0", 1001, 32 + 501),
        ("topk", 1001, 2 + 64 + 96),
        ("topk", 4097, 2 * (2 + 64 + 96)),
    ],
)
def test_length_by_formula(wire, numel, nbytes):
    assert make_codec(wire).nbytes(numel) == nbytes


@pytest.mark.parametrize(
    "wire, most", [("bf16", 0.5), ("int8", 0.27), ("fp4_e3m0", 0.14), ("int4", 0.14), ("topk", 0.01)]
)
def test_share_of_float32s_bytes(wire, most):
    assert make_codec(wire).nbytes(50_000_000) <= most * 4 * 50_000_000


@pytest.mark.parametrize("wire", WIRES, ids=name_of)
def test_length_does_not_depend_on_the_values(wire):
    coder = make_codec(wire.name, block=wire.block, density=wire.density)
    for numel in (1, 4096, 5000):
        for values in (torch.zeros(numel), heavy_tailed(numel)):
            plan = coder.prepare(numel)
            assert plan.nbytes == coder.nbytes(numel)
            plan.encode(values, torch.empty(plan.nbytes, dtype=torch.uint8))


@pytest.mark.parametrize(
    "arguments, words",
    [
        ({"wire": "int3"}, "int8"),
        ({"wire": "int8", "density": 0.1}, "density"),
        ({"wire": "topk", "block": 64}, "block"),
        ({"wire": "int8", "block": 63}, "even"),
        ({"wire": "int8", "block": 0}, "even"),
        ({"wire": "topk", "density": 0.0}, "density"),
        ({"wire": "topk", "density": 1.5}, "density"),
        ({"wire": "int8", "rounding": "up"}, "stochastic"),
    ],
)
def test_wrong_settings_are_refused_by_name(arguments, words):
    with pytest.raises(ValueError, match=words):
        make_codec(**arguments)


def test_wrong_tensors_are_refused():
    plan = make_codec("int8").prepare(100)
    good, buffer = torch.zeros(100), torch.zeros(plan.nbytes, dtype=torch.uint8)
    for values in (
        torch.zeros(99),
        torch.zeros(100, dtype=torch.float64),
        torch.zeros(200)[::2],
        torch.zeros(10, 10),
    ):
        with pytest.raises(ValueError, match="expected a contiguous"):
            plan.encode(values, buffer)
        with pytest.raises(ValueError, match="expected a contiguous"):
            plan.decode(buffer, values)
    for wrong in (buffer[:-1], buffer.to(torch.int8)):
        with pytest.raises(ValueError, match="expected a contiguous"):
            plan.encode(good, wrong)
        with pytest.raises(ValueError, match="expected a contiguous"):
            plan.decode(wrong, good)
    with pytest.raises(ValueError, match="cannot have"):
        make_codec("int8").prepare(-1)


@pytest.mark.parametrize("wire, qmax", [("int8", 127), ("int4", 7)])
def test_no_absmax_makes_a_code_overflow(wire, qmax):
    """Every eighth mantissa, alone in its block, in three binades; the last ends at float32's largest number."""
    for exponent in (27, 127, 254):
        values = torch.zeros(2 << 20)
        bits = (exponent << 23) + torch.arange(7, 1 << 23, 8, dtype=torch.int32)
        values.view(torch.int32)[::2] = bits
        plan = make_codec(wire, block=2).prepare(len(values))
        buffer, out = torch.empty(plan.nbytes, dtype=torch.uint8), torch.empty(len(values))
        plan.encode(values, buffer)
        plan.decode(buffer, out)
        ratio = out[::2].double() / values[::2].double()
        assert float(ratio.min()) >= 1 - 0.51 / qmax and float(ratio.max()) <= 1 + 0.51 / qmax
        assert torch.count_nonzero(out[1::2]) == 0


@pytest.mark.parametrize("wire", WIRES, ids=name_of)
def test_any_bytes_decode_to_something(wire):
    """A peer may be broken; its bytes must not take this island down."""
    plan = make_codec(wire.name, block=wire.block, density=wire.density).prepare(5001)
    for seed in range(3):
        noise = np.random.default_rng(seed).integers(0, 256, plan.nbytes, dtype=np.uint8)
        out = torch.empty(5001)
        plan.decode(torch.from_numpy(noise), out)
        if wire.name != "topk":  # where places may repeat, and which one wins is not said
            with np.errstate(all="ignore"):
                expected = reference.decode(wire, noise, 5001)
            assert np.array_equal(out.numpy(), expected, equal_nan=True)
