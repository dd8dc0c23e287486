"""Settings of v0.2 that are a mistake or none depending on other settings, which are not all known when they are read."""

from dataclasses import dataclass
from typing import Any

from torchtitan_diloco.config.fields import get
from torchtitan_diloco.config.layers import Where
from torchtitan_diloco.config.retired import OLD_VALUES, RETIRED, SAME_AS
from torchtitan_diloco.config.schema import RunConfig

_OVERLAP = "parallelism.pipeline_parallel_expert_parallel_overlap"
_CONVERTERS = "model.converters"


@dataclass(frozen=True, slots=True)
class Deferred:
    """What was written, and what to say about it."""

    key: str
    value: Any
    where: Where | None
    mistake: str
    """Said where it would have an effect."""
    at: str
    """Key and place in words, for the note where it has none."""

    def problem(self, config: RunConfig, bad: set[str]) -> str:
        """What is wrong with it in this configuration; "" where nothing is. ``bad``: keys reported already."""
        if self.key in SAME_AS:
            used = get(config, SAME_AS[self.key])
            return "" if type(self.value) is type(used) and self.value == used else f"{self.mistake} ({used})"
        if self.key == _OVERLAP:
            return self.mistake if config.parallelism.pipeline_parallel_degree > 1 else ""
        # Converters that could not be read may have named this one: tell of both at once.
        used = _CONVERTERS in bad or _converter(self.key) in config.model.converters
        return self.mistake if used else ""

    def note(self) -> str:
        """What to say where nothing is wrong; "" for what is simply right."""
        if self.key in SAME_AS:
            return ""
        if self.key == _OVERLAP:
            return f"{self.at} has no effect without pipeline parallelism"
        return f'{self.at} is not used: "{_converter(self.key)}" is not in {_CONVERTERS}'


def depends_on_others(key: str, value: Any) -> bool:
    """Whether the answer to this setting of v0.2 must wait."""
    if key.startswith("quantize."):
        return key in RETIRED or value in OLD_VALUES.get(key, ())
    return key in SAME_AS or key == _OVERLAP


def _converter(key: str) -> str:
    """``quantize.linear.mx`` of ``quantize.linear.mx.recipe_name``"""
    return key.rpartition(".")[0]
