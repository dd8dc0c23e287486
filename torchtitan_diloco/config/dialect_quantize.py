"""TorchTitan v0.2.2's [quantize] tables: the options of the low-precision formats that ``model.converters`` names."""

from dataclasses import dataclass, field
from typing import Literal


@dataclass(kw_only=True, slots=True)
class Float8LinearConfig:
    """[quantize.linear.float8]"""

    recipe_name: Literal["rowwise", "rowwise_with_gw_hp"] = "rowwise"
    """Scaling recipe; v0.2.2's default, tensorwise, is gone in 0.3.0."""
    filter_fqns: list[str] = field(default_factory=list)
    """Modules left as they are; the output layer is called "lm_head"."""
    emulate: bool = False
    """Emulate on older hardware; not with compile."""


@dataclass(kw_only=True, slots=True)
class MXLinearConfig:
    """[quantize.linear.mx]"""

    fqns: list[str] = field(default_factory=list)
    """Modules converted; none = all. Not a v0.2.2 key, which listed those left out."""


@dataclass(kw_only=True, slots=True)
class MXGroupedConfig:
    """[quantize.grouped_mm.mx]"""

    recipe_name: Literal["mxfp8_rceil"] = "mxfp8_rceil"
    """Scaling recipe."""
    pad_multiple: int = 32
    """Rows of one expert are padded to a multiple of this. Not a v0.2.2 key."""


@dataclass(kw_only=True, slots=True)
class LinearQuantizeConfig:
    """[quantize.linear]: dense layers"""

    float8: Float8LinearConfig = field(default_factory=Float8LinearConfig)
    """Float8."""
    mx: MXLinearConfig = field(default_factory=MXLinearConfig)
    """MXFP8."""


@dataclass(kw_only=True, slots=True)
class GroupedQuantizeConfig:
    """[quantize.grouped_mm]: the experts' grouped matrix products"""

    mx: MXGroupedConfig = field(default_factory=MXGroupedConfig)
    """MXFP8; float8 has no options."""


@dataclass(kw_only=True, slots=True)
class QuantizeConfig:
    """[quantize]"""

    linear: LinearQuantizeConfig = field(default_factory=LinearQuantizeConfig)
    """Dense layers."""
    grouped_mm: GroupedQuantizeConfig = field(default_factory=GroupedQuantizeConfig)
    """Experts."""
