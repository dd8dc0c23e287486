"""Keys of TorchTitan v0.2.2 that TorchTitan 0.3.0 cannot honour, and what to do instead."""

from typing import Any

RETIRED: dict[str, str] = {
    "job.config_file": "give the file on the command line: --job.config_file FILE.toml",
    "job.custom_config_module": "remove it; a package adds methods with @register_semi_sync instead",
    "model.tokenizer_path": "use model.hf_assets_path, the folder that holds tokenizer.json",
    "model.converters": "not supported by this version; remove it and choose training.mixed_precision_param",
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
    "quantize": "not supported by this version; remove the table",
    "fault_tolerance": "use [semi_sync], [transport] and [lighthouse]",
    "memory_estimation": "remove the table; TorchTitan 0.3 has no memory estimation",
    "experimental": "remove the table; a package adds methods with @register_semi_sync instead",
}
"""Full key or section -> the remedy."""

HARMLESS: dict[str, tuple[Any, ...]] = {
    "job.custom_config_module": ("",),
    "model.converters": ([],),
    "model.print_after_conversion": (False,),
    "optimizer.early_step_in_backward": (False,),
    "parallelism.disable_loss_parallel": (False,),
    "parallelism.expert_tensor_parallel_degree": (1,),
    "parallelism.context_parallel_rotate_method": ("allgather",),
    "checkpoint.enable_ft_dataloader_checkpoints": (True,),
    "activation_checkpoint.selective_ac_option": ("op",),
    "activation_checkpoint.early_stop": (False,),
}
"""Retired keys with values that say what happens anyway, as v0.2.2's own examples do: accepted with a note."""
