"""Wire codecs: how a flat float32 delta becomes bytes, and how every island turns those bytes into the same numbers.

``make_codec("int8").prepare(numel)`` gives a plan that encodes and decodes without allocating; ``ErrorFeedback`` adds the
residual. Layouts are in the modules of the codecs; nothing in a buffer says which codec made it, islands agree beforehand.
"""

from torchtitan_diloco.outer.codec.codec import Codec, Kernel, Plan
from torchtitan_diloco.outer.codec.feedback import ErrorFeedback
from torchtitan_diloco.outer.codec.noise import noise_seed
from torchtitan_diloco.outer.codec.registry import make_codec, register_codec, registered
from torchtitan_diloco.outer.codec.sliced import SlicedPlan

__all__ = [
    "Codec",
    "ErrorFeedback",
    "Kernel",
    "Plan",
    "SlicedPlan",
    "make_codec",
    "noise_seed",
    "register_codec",
    "registered",
]
