"""The whole configuration: one dataclass per TOML section under `RunConfig`, whose fields are the sections."""

from dataclasses import dataclass, field

from torchtitan_diloco.config.dialect import (
    ActivationCheckpointConfig,
    CheckpointConfig,
    CommConfig,
    CompileConfig,
    JobConfig,
    LoaderConfig,
    LRSchedulerConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelismConfig,
    TrainingConfig,
)
from torchtitan_diloco.config.dialect_quantize import QuantizeConfig
from torchtitan_diloco.config.dialect_watch import (
    DebugConfig,
    MetricsConfig,
    ProfilingConfig,
    ValidationConfig,
)
from torchtitan_diloco.config.own import (
    DataConfig,
    DataSource,
    IslandConfig,
    IslandTable,
    LighthouseConfig,
    MergeConfig,
    OuterConfig,
    SemiSyncConfig,
    SyncerConfig,
    TransportConfig,
)
from torchtitan_diloco.config.retired import HARMLESS, RETIRED

__all__ = [
    "HARMLESS",
    "RETIRED",
    "ActivationCheckpointConfig",
    "CheckpointConfig",
    "CommConfig",
    "CompileConfig",
    "DataConfig",
    "DataSource",
    "DebugConfig",
    "IslandConfig",
    "IslandTable",
    "JobConfig",
    "LRSchedulerConfig",
    "LighthouseConfig",
    "LoaderConfig",
    "MergeConfig",
    "MetricsConfig",
    "ModelConfig",
    "OptimizerConfig",
    "OuterConfig",
    "ParallelismConfig",
    "ProfilingConfig",
    "QuantizeConfig",
    "RunConfig",
    "SemiSyncConfig",
    "SyncerConfig",
    "TrainingConfig",
    "TransportConfig",
    "ValidationConfig",
]


@dataclass(kw_only=True, slots=True)
class RunConfig:
    """Everything a run is told. TorchTitan's sections first, then ours."""

    job: JobConfig = field(default_factory=JobConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    lr_scheduler: LRSchedulerConfig = field(default_factory=LRSchedulerConfig)
    parallelism: ParallelismConfig = field(default_factory=ParallelismConfig)
    activation_checkpoint: ActivationCheckpointConfig = field(default_factory=ActivationCheckpointConfig)
    compile: CompileConfig = field(default_factory=CompileConfig)
    comm: CommConfig = field(default_factory=CommConfig)
    quantize: QuantizeConfig = field(default_factory=QuantizeConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    metrics: MetricsConfig = field(default_factory=MetricsConfig)
    profiling: ProfilingConfig = field(default_factory=ProfilingConfig)
    validation: ValidationConfig = field(default_factory=ValidationConfig)
    debug: DebugConfig = field(default_factory=DebugConfig)
    data: DataConfig = field(default_factory=DataConfig)
    island: IslandConfig = field(default_factory=IslandConfig)
    lighthouse: LighthouseConfig = field(default_factory=LighthouseConfig)
    transport: TransportConfig = field(default_factory=TransportConfig)
    semi_sync: SemiSyncConfig = field(default_factory=SemiSyncConfig)
    syncer: SyncerConfig = field(default_factory=SyncerConfig)
    islands: list[IslandTable] = field(default_factory=list)
