"""TorchTitan v0.2.2's TOML sections, with that version's names and defaults.

A section lists the keys that TorchTitan 0.3.0 can still honour (``config/translate.py`` maps them); what it cannot
is in ``config/retired.py``. Where a default differs from v0.2.2's, the docstring of the field says so and why.
"""

from dataclasses import dataclass, field
from typing import Literal


@dataclass(kw_only=True, slots=True)
class JobConfig:
    """[job]"""

    base: str = ""
    """TorchTitan config function to start from, for instance "llama3.llama3_8b": what the file does not write comes
    from it; "" = none. Not a v0.2.2 key."""
    dump_folder: str = "./outputs"
    """Folder that holds the run folders; the run's own is `<dump_folder>/<name>`."""
    name: str = ""
    """Name of the run and of its folder; "" = the config file's name without `.toml`. Not a v0.2.2 key."""
    description: str = "default job"
    """Free text, kept in the run folder's config.toml."""
    print_config: bool = False
    """Whether the trainer logs TorchTitan's own resolved config at start."""
    save_config_file: str | None = None
    """Path below the island's folder to which TorchTitan writes its own resolved config as JSON."""


@dataclass(kw_only=True, slots=True)
class ModelConfig:
    """[model]"""

    name: str = "llama3"
    """TorchTitan model, a module of `torchtitan.models`. A run must say this, the flavor or `job.base`."""
    flavor: str = "debugmodel"
    """Flavor in that model's registry. v0.2's suffixes `_flex_attn`, `_flex`, `_varlen_attn`, `_varlen` still work."""
    hf_assets_path: str = "bundled:bpe2048"
    """Folder with tokenizer.json (and weights, for an initial load). "bundled:bpe2048" = the shipped
    2,048-entry BPE, which fits `debugmodel`; v0.2.2's default pointed into its own test assets."""
    vocab_size: int = 0
    """Rows of the embedding and of the output layer; 0 = the flavor's own. Not a v0.2.2 key."""
    converters: list[
        Literal[
            "quantize.linear.float8",
            "quantize.linear.mx",
            "quantize.grouped_mm.float8",
            "quantize.grouped_mm.mx",
        ]
    ] = field(default_factory=list)
    """Low-precision formats, each set by the table of its name; they need torchao and a recent accelerator."""


@dataclass(kw_only=True, slots=True)
class LoaderConfig:
    """[training.dataloader] and [validation.dataloader]: passed to torchdata's StatefulDataLoader

    (training: only without [[data.sources]], whose loader reads in the trainer's own process).
    """

    num_workers: int = 0
    """Worker processes per rank."""
    persistent_workers: bool = False
    """Keep workers between epochs; needs num_workers > 0."""
    pin_memory: bool = False
    """Copy batches to pinned memory."""
    prefetch_factor: int | None = None
    """Batches loaded ahead by each worker; needs num_workers > 0."""


@dataclass(kw_only=True, slots=True)
class TrainingConfig:
    """[training]"""

    dataset: str = "c4_test"
    """Data set of TorchTitan's own loader; used when no [[data.sources]] is given."""
    dataset_path: str | None = None
    """Where that data set lies on disk."""
    local_batch_size: int = 8
    """Sequences per data-parallel rank and micro-step."""
    global_batch_size: int = -1
    """Sequences per optimizer step of one island; -1 = local_batch_size x data-parallel degree."""
    seq_len: int = 2048
    """Tokens per sequence."""
    max_norm: float = 1.0
    """Gradient clipping norm."""
    steps: int = 10000
    """Inner steps of the run (run progress)."""
    enable_cpu_offload: bool = False
    """Keep FSDP's parameters, gradients and optimizer state in host memory."""
    disable_cuda_graphs: bool = True
    """TorchTitan 0.3.0 captures the step as a CUDA graph unless told not to; v0.2.2 did not, and pipelines cannot."""
    dtype: Literal["bfloat16", "float32"] = "float32"
    """dtype of parameters and optimizer state."""
    mixed_precision_param: Literal["bfloat16", "float32"] = "bfloat16"
    """dtype of compute under FSDP or autocast."""
    mixed_precision_reduce: Literal["float32"] = "float32"
    """dtype of FSDP's gradient reduction."""
    gc_freq: int = 50
    """Inner steps between two Python garbage collections."""
    gc_debug: bool = False
    """Collect at every step and report reference cycles."""
    dataloader: LoaderConfig = field(default_factory=LoaderConfig)
    """Settings of TorchTitan's own loader."""


@dataclass(kw_only=True, slots=True)
class OptimizerConfig:
    """[optimizer]: the inner optimizer"""

    name: Literal["Adam", "AdamW"] = "AdamW"
    """Optimizer class."""
    lr: float = 8e-4
    """Peak learning rate."""
    beta1: float = 0.9
    """Decay of the first moment."""
    beta2: float = 0.95
    """Decay of the second moment."""
    eps: float = 1e-8
    """Added to the denominator."""
    weight_decay: float = 0.1
    """Weight decay."""
    implementation: Literal["for-loop", "foreach", "fused", "fused_opt_states_bf16"] = "fused"
    """Kernel choice; the last one is new in 0.3.0 and keeps both moments in bfloat16."""


@dataclass(kw_only=True, slots=True)
class LRSchedulerConfig:
    """[lr_scheduler]"""

    warmup_steps: int = 200
    """Inner steps of linear warm-up."""
    total_steps: int | None = None
    """Length of the schedule in inner steps; absent = training.steps."""
    decay_ratio: float | None = None
    """Share of the schedule that decays; absent = decay begins right after warm-up."""
    decay_type: Literal["linear", "sqrt", "cosine"] = "linear"
    """Shape of the decay."""
    min_lr_factor: float = 0.0
    """Final learning rate as a fraction of optimizer.lr."""


@dataclass(kw_only=True, slots=True)
class ParallelismConfig:
    """[parallelism]: inside one island; islands may differ"""

    data_parallel_replicate_degree: int = 1
    """Replicas inside the island (HSDP/DDP)."""
    data_parallel_shard_degree: int = -1
    """FSDP shards; -1 = all ranks that are left."""
    fsdp_reshard_after_forward: Literal["default", "always", "never"] = "default"
    """FSDP's resharding policy."""
    enable_fsdp_symm_mem: bool = False
    """FSDP collectives through symmetric memory; new in 0.3.0."""
    tensor_parallel_degree: int = 1
    """Tensor-parallel ranks."""
    enable_sequence_parallel: bool = True
    """Split the sequence between tensor-parallel ranks where they would hold it twice; new in 0.3.0."""
    enable_async_tensor_parallel: bool = False
    """Overlap TP collectives with matrix products; needs compile."""
    pipeline_parallel_degree: int = 1
    """Pipeline ranks."""
    module_fqns_per_model_part: list[list[str]] | None = None
    """Module names of each pipeline part; absent = computed."""
    pipeline_parallel_first_stage_less_layers: int = 1
    """Layers fewer in the first stage."""
    pipeline_parallel_last_stage_less_layers: int = 1
    """Layers fewer in the last stage."""
    pipeline_parallel_layers_per_stage: int | None = None
    """Layers per (virtual) stage; absent = computed."""
    pipeline_parallel_schedule: str = "1F1B"
    """Pipeline schedule."""
    pipeline_parallel_schedule_csv: str = ""
    """CSV file with a schedule."""
    pipeline_parallel_microbatch_size: int = 1
    """Sequences per pipeline micro-batch."""
    context_parallel_degree: int = 1
    """Context-parallel ranks."""
    context_parallel_load_balancer: Literal["headtail", "ptrr", "none"] = "headtail"
    """How the sequence is cut; "none" is what v0.2.2 wrote as None, which TOML cannot say."""
    context_parallel_ptrr_mask_key: str | None = None
    """Which of several attention masks "ptrr" balances by; new in 0.3.0."""
    expert_parallel_degree: int = 1
    """Expert-parallel ranks (mixture of experts)."""
    expert_parallel_comm_backend: Literal["standard", "deepep", "hybridep", "minimal_async_ep"] = "standard"
    """Token dispatch between expert-parallel ranks; the last two are new in 0.3.0."""
    spmd_backend: Literal["partial_dtensor", "full_dtensor", "spmd_types"] = "spmd_types"
    """How TorchTitan expresses sharding; new in 0.3.0."""


@dataclass(kw_only=True, slots=True)
class CheckpointConfig:
    """[checkpoint]"""

    enable: bool = False
    """Whether to save and load checkpoints."""
    folder: str = "checkpoint"
    """Folder below the island's."""
    interval: int = 500
    """Inner steps between two checkpoints."""
    initial_load_path: str | None = None
    """Checkpoint to begin from when the island has none of its own."""
    initial_load_model_only: bool = True
    """Take only the model from it."""
    initial_load_in_hf: bool = False
    """It is in Hugging Face safetensors."""
    initial_load_in_hf_quantized: bool = False
    """It is quantized as well."""
    last_save_model_only: bool = False
    """Save only the model at the last step. v0.2.2's default is true, from which a run cannot be continued."""
    last_save_in_hf: bool = False
    """Write that model in Hugging Face safetensors."""
    export_dtype: Literal["float16", "bfloat16", "float32"] = "float32"
    """dtype of a model-only last save."""
    async_mode: Literal["disabled", "async", "async_with_pinned_mem"] = "disabled"
    """How torch's distributed checkpoint writes."""
    keep_latest_k: int = 10
    """Checkpoints kept; 0 = all; 1 is refused because the newest may be incomplete."""
    load_step: int = -1
    """Step to load; -1 = the latest."""
    exclude_from_loading: list[str] = field(default_factory=list)
    """States not loaded, for instance "optimizer"."""
    enable_first_step_checkpoint: bool = False
    """Save after the first step as well."""
    create_seed_checkpoint: bool = False
    """Only initialise the model and save it as step 0."""
    load_only: bool = False
    """Load but never save."""


@dataclass(kw_only=True, slots=True)
class ActivationCheckpointConfig:
    """[activation_checkpoint]"""

    mode: Literal["selective", "full", "memory_budget", "none"] = "selective"
    """What is recomputed in the backward pass; "selective" is per operation in 0.3.0."""
    per_op_sac_force_recompute_mm_shapes_by_fqns: list[str] = field(
        default_factory=lambda: ["moe.router.gate"]
    )
    """Linear modules whose matrix shapes are always recomputed (mode "selective")."""
    memory_budget: float = 0.5
    """0 = recompute everything, 1 = nothing (mode "memory_budget")."""
    visualize_memory_budget_pareto: bool = False
    """Draw the trade-off (mode "memory_budget")."""
    preserve_rng_state: bool = True
    """Restore the random state when recomputing."""
    determinism_check: str = "default"
    """torch.utils.checkpoint's check."""
    debug: bool = False
    """Slow checks of the recomputation."""


@dataclass(kw_only=True, slots=True)
class CompileConfig:
    """[compile]"""

    enable: bool = False
    """Whether to use torch.compile."""
    components: list[Literal["model", "loss"]] = field(default_factory=lambda: ["model", "loss"])
    """What is compiled."""
    backend: str = "inductor"
    """torch.compile backend."""


@dataclass(kw_only=True, slots=True)
class CommConfig:
    """[comm]: collectives inside one island"""

    init_timeout_seconds: int = 300
    """Time-out until the end of the first step, in seconds."""
    train_timeout_seconds: int = 100
    """Time-out after it, in seconds."""
    trace_buf_size: int = 20000
    """Entries of NCCL's flight recorder; 0 = off."""
    save_traces_folder: str = "comm_traces"
    """Its folder."""
    save_traces_file_prefix: str = "rank_"
    """Prefix of its files."""
    mode: Literal["default", "fake_backend", "local_tensor", "torchcomms"] = "default"
    """"fake_backend" and "local_tensor" are for dry runs; "torchcomms" is new in 0.3.0."""
