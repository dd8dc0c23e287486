"""TorchTitan on the CPU: device shim, document-aware attention and settings that make sense without an accelerator.

Every public function does nothing, and says so by its return value, where an accelerator is present.
"""

from torchtitan_diloco.cpu.adapt import adapt_config, adapt_model
from torchtitan_diloco.cpu.attention import DocSDPA
from torchtitan_diloco.cpu.device import accelerator_present, install

__all__ = ["DocSDPA", "accelerator_present", "adapt_config", "adapt_model", "install"]
