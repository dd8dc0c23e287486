"""Names that TorchTitan 0.3 and torch take for some settings, known without importing them; a test compares them."""

TEXT_MODELS = ("llama3", "qwen3", "deepseek_v3", "gpt_oss")
"""Modules of `torchtitan.models` that are trained here, and whose config functions can be a base."""

DATASETS = ("c4", "c4_test", "c4_validation")
"""Data sets of TorchTitan's own loader."""

PIPELINE_SCHEDULES = (
    "1F1B",
    "Interleaved1F1B",
    "GPipe",
    "LoopedBFS",
    "InterleavedZeroBubble",
    "PipelineScheduleSingle",
    "PipelineScheduleMulti",
    "ZBVZeroBubble",
    "DualPipeV",
)
"""Of torch.distributed.pipelining, which takes them in capitals or not."""


def is_dataset(name: str) -> bool:
    """Whether TorchTitan's loader has it; it asks in small letters."""
    return name.lower() in DATASETS


def is_schedule(name: str) -> bool:
    """Whether torch has this pipeline schedule."""
    return name.lower() in {schedule.lower() for schedule in PIPELINE_SCHEDULES}
