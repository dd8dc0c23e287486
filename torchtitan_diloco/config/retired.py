"""Keys of TorchTitan v0.2 that TorchTitan 0.3.0 cannot honour or knows by another name, and what to do instead."""

from dataclasses import dataclass
from typing import Any, Literal

_TENSORWISE = "remove it; it belongs to tensorwise scaling, which TorchTitan 0.3 has replaced by rowwise"
_METHODS = "a package adds methods with @register_semi_sync instead"

RETIRED: dict[str, str] = {
    "job.config_file": "give the file on the command line: --job.config_file FILE.toml",
    "job.custom_config_module": f"remove it; {_METHODS}",
    "model.print_after_conversion": "remove it",
    "optimizer.early_step_in_backward": "remove it; TorchTitan 0.3 has no optimizer step inside the backward pass",
    "parallelism.disable_loss_parallel": "remove it; TorchTitan 0.3 always computes the loss in parallel",
    "parallelism.expert_tensor_parallel_degree": "remove it; expert parallelism takes its ranks from TP too",
    "parallelism.context_parallel_rotate_method": "remove it; TorchTitan 0.3 always all-gathers",
    "parallelism.pipeline_parallel_expert_parallel_overlap": "remove it; TorchTitan 0.3 has no such switch",
    "checkpoint.enable_ft_dataloader_checkpoints": "remove it; the position in the data is always in the checkpoint",
    "activation_checkpoint.selective_ac_option": (
        'only "op" exists in TorchTitan 0.3 (every n-th layer is gone); set it to "op" or remove it, '
        'or set activation_checkpoint.mode = "full"'
    ),
    "activation_checkpoint.early_stop": "remove it; TorchTitan 0.3 never stops early",
    "validation.local_batch_size": "remove it; training.local_batch_size is used",
    "validation.seq_len": "remove it; training.seq_len is used",
    "quantize.linear.float8.enable_fsdp_float8_all_gather": _TENSORWISE,
    "quantize.linear.float8.precompute_float8_dynamic_scale_for_fsdp": _TENSORWISE,
    "quantize.linear.mx.mxfp8_dim1_cast_kernel_choice": "remove it; TorchTitan 0.3 chooses the kernel itself",
    "quantize.linear.mx.recipe_name": "remove it; TorchTitan 0.3 has one recipe for dense layers",
    "quantize.linear.mx.filter_fqns": "list the modules to convert in quantize.linear.mx.fqns instead",
    "quantize.grouped_mm.float8.fqns": "remove it; TorchTitan 0.3 converts the experts of every layer",
    "quantize.grouped_mm.mx.fqns": "remove it; TorchTitan 0.3 converts the experts of every layer",
    "memory_estimation": "remove the table; TorchTitan 0.3 has no memory estimation",
    "memory_estimation.enable": "remove the table; TorchTitan 0.3 has no memory estimation",
    "memory_estimation.disable_fake_mode": "remove the table; TorchTitan 0.3 has no memory estimation",
    "experimental": f"remove the table; {_METHODS}",
    **{
        f"experimental.{name}": f"it is in [parallelism] now; write parallelism.{name}"
        for name in ("pipeline_parallel_degree", "context_parallel_degree", "enable_async_tensor_parallel")
    },
    "experimental.custom_import": f"remove it; {_METHODS}",
    "experimental.custom_args_module": f"remove it; {_METHODS}",
}
"""Full key or section -> the remedy."""

HARMLESS: dict[str, tuple[Any, ...]] = {
    "job.custom_config_module": ("",),
    "model.print_after_conversion": (False,),
    "optimizer.early_step_in_backward": (False,),
    "parallelism.disable_loss_parallel": (False,),
    "parallelism.expert_tensor_parallel_degree": (1,),
    "parallelism.context_parallel_rotate_method": ("allgather",),
    "checkpoint.enable_ft_dataloader_checkpoints": (True,),
    "activation_checkpoint.selective_ac_option": ("op",),
    "activation_checkpoint.early_stop": (False,),
    "quantize.linear.float8.enable_fsdp_float8_all_gather": (False,),
    "quantize.linear.float8.precompute_float8_dynamic_scale_for_fsdp": (False,),
    "quantize.linear.mx.filter_fqns": ([],),
    "memory_estimation.enable": (False,),
    "memory_estimation.disable_fake_mode": (False,),
    "experimental.custom_import": ("",),
    "experimental.custom_args_module": ("",),
}
"""Retired keys with values that say what happens anyway, as v0.2.2's own examples do: accepted with a note."""

OLD_VALUES: dict[str, tuple[str, ...]] = {
    "quantize.linear.float8.recipe_name": ("tensorwise",),
    "quantize.grouped_mm.mx.recipe_name": ("mxfp8",),
}
"""Key of today -> values that only v0.2 has, which are no mistake in a table that nothing switches on."""

RENAMED_MODULES = {"output": "lm_head"}
"""v0.2's name of a module -> TorchTitan 0.3's."""

NAME_MODULES = (
    "quantize.linear.float8.filter_fqns",
    "parallelism.module_fqns_per_model_part",
    "semi_sync.module_fqns_per_fragment",
)
"""Keys in whose lists modules are renamed from v0.2's names, with a note."""

SAME_AS: dict[str, str] = {
    "validation.local_batch_size": "training.local_batch_size",
    "validation.seq_len": "training.seq_len",
}
"""Retired key -> the key whose value is used; accepted with a note where both are equal."""


@dataclass(frozen=True, slots=True)
class Moved:
    """A key that lives on under another name; ``divisor`` turns its unit into ours. base: "" where the new key's own
    type is check enough."""

    new: str
    base: Literal["bool", "int", "str", ""]
    divisor: int = 1
    only: tuple[str, ...] = ()
    """Values that can be honoured; none = any."""


MOVED: dict[str, Moved] = {
    "model.tokenizer_path": Moved("model.hf_assets_path", "str"),
    "training.seed": Moved("debug.seed", "int"),
    "training.deterministic": Moved("debug.deterministic", "bool"),
    "training.compile": Moved("compile.enable", "bool"),
    "checkpoint.enable_checkpoint": Moved("checkpoint.enable", "bool"),
}
"""Old name -> where its value goes; accepted with a note."""

FAULT_TOLERANCE_MOVED: dict[str, Moved] = {
    "fault_tolerance.semi_sync_method": Moved("semi_sync.method", "str", only=("diloco", "local_sgd")),
    "fault_tolerance.sync_steps": Moved("semi_sync.sync_every", "int"),
    "fault_tolerance.group_size": Moved("semi_sync.num_islands", "int"),
    "fault_tolerance.num_fragments": Moved("semi_sync.fragments", "int"),
    "fault_tolerance.module_fqns_per_model_fragment": Moved("semi_sync.module_fqns_per_fragment", ""),
    "fault_tolerance.fragment_sync_delay": Moved("semi_sync.overlap", "int"),
    "fault_tolerance.replica_id": Moved("island.id", "int"),
    "fault_tolerance.process_group": Moved("transport.kind", "str", only=("gloo",)),
    "fault_tolerance.process_group_timeout_ms": Moved("transport.exchange_timeout_s", "int", divisor=1000),
}
"""[fault_tolerance] -> ours, where `enable = true`."""

FAULT_TOLERANCE_RETIRED: dict[str, tuple[Any, str]] = {
    "fault_tolerance.min_replica_size": (1, "an exchange takes whoever is there; set it to 1 or remove it"),
    "fault_tolerance.should_quantize": (
        False,
        'set it to false or remove it, and write semi_sync.codec.wire = "int8" instead',
    ),
    "fault_tolerance.fragment_update_alpha": (
        0.0,
        "set it to 0.0 or remove it, and write semi_sync.mix_alpha instead",
    ),
}
"""The rest of it -> the value that says what happens anyway, and the remedy for any other."""

ALIASES: dict[str, str] = {
    "diloco": "[semi_sync]",
    "local_sgd": "[semi_sync]",
    "ft": "[semi_sync]",
    "fault_tolerance": "[semi_sync]",
    "profiler": "[profiling]",
    "validator": "[validation]",
    "float8": "[quantize.linear.float8]",
    "mx": "[quantize.linear.mx]",
}
"""Sections that people write -> the one that was probably meant."""
