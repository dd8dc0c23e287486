"""Fits a TorchTitan trainer configuration, and then the built model, to the CPU."""

import logging
from collections.abc import Collection, Iterator
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule
from torchtitan.components.quantization.utils import has_quantization
from torchtitan.config.override import derive
from torchtitan.models.common.attention import FlexAttention, VarlenAttention
from torchtitan.models.common.token_dispatcher import (
    DeepEPTokenDispatcher,
    HybridEPTokenDispatcher,
    MinimalAsyncEPTokenDispatcher,
)
from torchtitan.trainer import Trainer

from torchtitan_diloco.cpu.attention import DocSDPA
from torchtitan_diloco.cpu.device import accelerator_present
from torchtitan_diloco.cpu.init import make_init_independent_of_sharding
from torchtitan_diloco.errors import UserError

logger = logging.getLogger(__name__)

_CUDA_DISPATCHERS = (
    DeepEPTokenDispatcher.Config,
    HybridEPTokenDispatcher.Config,
    MinimalAsyncEPTokenDispatcher.Config,
)


def adapt_config(config: Trainer.Config, user_set: Collection[str] = ()) -> bool:
    """Change ``config``, in place, so that TorchTitan's trainer runs it on the CPU. Calling it again, with
    the same ``user_set``, changes nothing.

    Attention becomes :class:`DocSDPA`; initial weights become independent of the sharding; CUDA graphs, CPU offload
    and pinned memory go off; mixed precision becomes float32, unless ``user_set`` holds
    "training.mixed_precision_param": then bfloat16 stays, with a warning.

    Args:
        config: Trainer configuration with its ``model_spec`` set.
        user_set: Dotted keys of the TOML dialect that the user wrote, as opposed to defaults.

    Returns:
        True if ``config`` is now one for the CPU, False (and untouched) where an accelerator is present.

    Raises:
        UserError: Settings that only an accelerator can honour, one line each; ``config`` is untouched.
    """
    if accelerator_present():
        return False
    problems = list(_unavailable(config, user_set))
    if problems:
        raise UserError("\n".join(problems))
    _substitute_attention(config)
    make_init_independent_of_sharding(config.model_spec)
    training = config.training
    training.disable_cuda_graphs = True
    training.enable_cpu_offload = False
    _choose_precision(training, user_set)
    loaders: list[Any] = [config.dataloader, getattr(config.validator, "dataloader", None)]
    for loader in loaders:
        if getattr(loader, "pin_memory", False):
            loader.pin_memory = False
    return True


def adapt_model(model_parts: Collection[nn.Module]) -> None:
    """Make FSDP reduce by plain sums; call it once the trainer is built. Does nothing where an accelerator is present.

    TorchTitan sets a gradient divide factor of 1, which FSDP turns into ``ReduceOp.PREMUL_SUM``; gloo has none.
    """
    if accelerator_present():
        return
    for part in model_parts:
        for module in part.modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)


def _keeps_bfloat16(training: Any, user_set: Collection[str]) -> bool:
    return training.mixed_precision_param != "float32" and "training.mixed_precision_param" in user_set


def _choose_precision(training: Any, user_set: Collection[str]) -> None:
    if not _keeps_bfloat16(training, user_set):
        training.mixed_precision_param = "float32"
    else:
        logger.warning(
            'training.mixed_precision_param = %r on a CPU is about 13 times slower than "float32"',
            training.mixed_precision_param,
        )


def _substitute_attention(config: Trainer.Config) -> None:
    assert config.model_spec is not None
    for _, inner, parent, attr in list(
        config.model_spec.traverse((FlexAttention.Config, VarlenAttention.Config))
    ):
        if isinstance(inner, DocSDPA.Config):
            continue
        replacement = derive(inner, DocSDPA.Config)
        if isinstance(parent, list):
            parent[attr] = replacement
        else:
            setattr(parent, attr, replacement)


def _unavailable(config: Trainer.Config, user_set: Collection[str]) -> Iterator[str]:
    """One sentence for each setting that the CPU cannot honour, naming it as the TOML does."""
    assert config.model_spec is not None, "adapt_config needs a configuration whose model_spec is set"
    model = config.model_spec.model
    checkpoint, parallelism, optimizer = config.checkpoint, config.parallelism, config.optimizer
    if checkpoint.enable and getattr(checkpoint, "async_mode", "disabled") == "async_with_pinned_mem":
        yield (
            'checkpoint.async_mode = "async_with_pinned_mem" needs an accelerator: use "async" or "disabled" on a CPU'
        )
    if parallelism.context_parallel_degree > 1:
        yield "parallelism.context_parallel_degree: context parallelism needs an accelerator: set it to 1 on a CPU"
    if parallelism.enable_fsdp_symm_mem:
        yield "parallelism.enable_fsdp_symm_mem needs CUDA devices: set it to false on a CPU"
    if config.compile.enable_async_tensor_parallel:
        yield "parallelism.enable_async_tensor_parallel needs CUDA devices: set it to false on a CPU"
    if config.profiler.enable_memory_snapshot:
        yield "profiling.enable_memory_snapshot records accelerator memory: set it to false on a CPU"
    if optimizer.implementation == "fused_opt_states_bf16":
        yield 'optimizer.implementation = "fused_opt_states_bf16" needs CUDA devices: use "fused" on a CPU'
    if any(group.optimizer_name == "DistMuon" for group in optimizer.param_groups):
        yield 'optimizer.name = "DistMuon" needs one CUDA device per process: use "AdamW" or "Adam" on a CPU'
    if has_quantization(model):
        yield "model.converters: low-precision formats need an accelerator: remove the quantize converters on a CPU"
    if any(True for _ in model.traverse(_CUDA_DISPATCHERS)):
        yield 'parallelism.expert_parallel_comm_backend needs CUDA devices: use "standard" on a CPU'
    if config.model_spec.name == "gpt_oss" and not _keeps_bfloat16(config.training, user_set):
        # Its experts always compute in bfloat16, and torch refuses to add that to a float32 output.
        yield 'training.mixed_precision_param: gpt_oss trains on a CPU in "bfloat16" only: set it so'
    for fqn, varlen, parent, _ in model.traverse(VarlenAttention.Config):
        # Models that keep the window on the attention itself build a mask for it; others rely on the kernel.
        window = getattr(parent, "sliding_window_size", None)
        if varlen.window_size[1] != 0 or (window is None and varlen.window_size[0] != -1):
            yield f"model.flavor: the attention window of {fqn} needs an accelerator: choose another flavor on a CPU"
