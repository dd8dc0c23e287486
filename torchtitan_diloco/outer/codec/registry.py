"""Codecs by the names that configurations give them."""

from collections.abc import Callable
from typing import Any, Literal, get_args

from torchtitan_diloco.outer.codec.codec import Codec
from torchtitan_diloco.outer.codec.fp4 import Fp4E3M0
from torchtitan_diloco.outer.codec.integer import Int4, Int8
from torchtitan_diloco.outer.codec.plain import BFloat16, Float32
from torchtitan_diloco.outer.codec.topk import TopK
from torchtitan_diloco.outer.names import WIRE, WIRE_SETTINGS, add, load_declared

Rounding = Literal["nearest", "stochastic"]

_makers: dict[str, tuple[Callable[..., Codec], frozenset[str]]] = {}


def register_codec(wire: str, maker: Callable[..., Codec], settings: tuple[str, ...] = ()) -> None:
    """Make ``maker`` known as ``wire``. settings: which of block, density and stochastic it takes, as keywords."""
    _makers[wire] = (maker, frozenset(settings))
    add(WIRE, wire)


def registered() -> tuple[str, ...]:
    return tuple(_makers)


def make_codec(
    wire: str,
    *,
    block: int | None = None,
    density: float | None = None,
    rounding: Rounding = "nearest",
) -> Codec:
    """The codec of that name; None stands for its own default.

    block: values that share a scale (int8, int4, fp4_e3m0). density: share of values sent (topk). rounding: fp32 does not
    round, so it takes either. Raises ValueError for an unknown name, a value out of range, or a setting that the codec
    does not have.
    """
    if wire not in _makers:
        load_declared(WIRE, wire)
    if wire not in _makers:
        raise ValueError(f'wire: "{wire}" is not a codec; there are {", ".join(registered())}')
    if rounding not in get_args(Rounding):
        raise ValueError(f'rounding: "{rounding}" is neither "nearest" nor "stochastic"')
    maker, takes = _makers[wire]
    given: dict[str, Any] = {"block": block, "density": density}
    for name, value in given.items():
        if value is not None and name not in takes:
            raise ValueError(f'{name}: the codec "{wire}" has no such setting; leave it out')
    settings = {name: value for name, value in given.items() if value is not None}
    if "stochastic" in takes:
        settings["stochastic"] = rounding == "stochastic"
    return maker(**settings)


_SHIPPED: dict[str, Callable[..., Codec]] = {
    "fp32": Float32,
    "bf16": BFloat16,
    "int8": Int8,
    "fp4_e3m0": Fp4E3M0,
    "int4": Int4,
    "topk": TopK,
}
for _wire, _maker in _SHIPPED.items():
    register_codec(_wire, _maker, WIRE_SETTINGS[_wire])
