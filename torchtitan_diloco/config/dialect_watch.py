"""TorchTitan v0.2.2's TOML sections for watching a run: metrics, profiling, validation, debug (see ``dialect.py``)."""

from dataclasses import dataclass, field

from torchtitan_diloco.config.dialect import LoaderConfig


@dataclass(kw_only=True, slots=True)
class MetricsConfig:
    """[metrics]"""

    log_freq: int = 10
    """Inner steps between two log lines and `inner` events."""
    enable_tensorboard: bool = False
    """Write TensorBoard files."""
    disable_color_printing: bool = False
    """No colours in the log."""
    save_tb_folder: str = "tb"
    """Their folder below the island's."""
    save_for_all_ranks: bool = False
    """Every rank writes them."""
    enable_wandb: bool = False
    """Log to Weights & Biases."""


@dataclass(kw_only=True, slots=True)
class ProfilingConfig:
    """[profiling]"""

    enable_profiling: bool = False
    """Whether torch's profiler runs."""
    save_traces_folder: str = "profile_traces"
    """Folder of its traces."""
    profile_freq: int = 10
    """Inner steps of one profiling cycle."""
    profiler_active: int = 1
    """Steps recorded in each cycle."""
    profiler_warmup: int = 3
    """Warm-up steps before them."""
    profiler_repeat: int | None = None
    """Cycles recorded in all; absent = to the end. New in 0.3.0."""
    profiler_skip_first: int | None = None
    """Steps before the first cycle. New in 0.3.0."""
    profiler_skip_first_wait: int | None = None
    """Above 0: the first cycle begins with no idle steps. New in 0.3.0."""
    enable_memory_snapshot: bool = False
    """Record device memory."""
    memory_snapshot_freq: int | None = None
    """Inner steps between two snapshots; absent = profile_freq. New in 0.3.0."""
    memory_snapshot_max_entries: int = 1_000_000
    """Allocations that a snapshot can hold. New in 0.3.0."""
    save_memory_snapshot_folder: str = "memory_snapshot"
    """Folder of the snapshots."""


@dataclass(kw_only=True, slots=True)
class ValidationConfig:
    """[validation]: TorchTitan's validator; batch and sequence length are those of [training]"""

    enable: bool = False
    """Whether to validate."""
    dataset: str = "c4_validation"
    """Data set."""
    dataset_path: str | None = None
    """Where it lies on disk."""
    freq: int = 10
    """Inner steps between two validations."""
    steps: int = -1
    """Batches of one validation; -1 = the whole set."""
    dataloader: LoaderConfig = field(default_factory=LoaderConfig)
    """Settings of its loader."""


@dataclass(kw_only=True, slots=True)
class DebugConfig:
    """[debug]"""

    seed: int | None = None
    """Seed of the initial weights and of every random choice; absent = drawn by each island."""
    deterministic: bool = False
    """Deterministic kernels only."""
    deterministic_warn_only: bool = False
    """Warn where there is none instead of failing."""
    moe_force_load_balance: bool = False
    """Spread tokens over experts evenly."""
    detect_anomaly: bool = False
    """torch's anomaly detection, which is slow; new in 0.3.0."""
    spmd_typechecking: bool = False
    """Check sharding types at run time; new in 0.3.0."""
    enable_structured_logging: bool = True
    """TorchTitan's own trace files; new in 0.3.0."""
    pace_step_seconds: float = 0.0
    """Stretch every inner step to this many seconds of wall time by sleeping; 0 = off. Not a v0.2.2 key."""
    dump_sends: bool = False
    """Write the parameters at every send to `island-<id>/sends/`. Not a v0.2.2 key."""
    inject_faults: bool = False
    """Make a weight NaN when the file `island-<id>/inject` appears, as `chaos` makes it. Not a v0.2.2 key."""
