"""Ranges of values and rules between settings, each naming the settings and numbers it is about."""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torchtitan_diloco.config.fields import get
from torchtitan_diloco.config.schema import RunConfig


@dataclass(frozen=True, slots=True)
class Range:
    """A test of one value and its wording: "must be ..."."""

    holds: Callable[[Any], bool]
    wording: str


def _least(bound: float, *also: int) -> Range:
    words = "".join(f" or {a}" for a in also)
    return Range(lambda v: v >= bound or v in also, f"at least {bound}{words}")


POSITIVE = Range(lambda v: v > 0, "greater than 0")
AT_LEAST_0, AT_LEAST_1 = _least(0), _least(1)
SHARE = Range(lambda v: 0 <= v <= 1, "from 0 to 1")
BELOW_1 = Range(lambda v: 0 <= v < 1, "at least 0 and less than 1")
NOT_EMPTY = Range(lambda v: bool(v.strip()), "a non-empty string")
FOLDER_NAME = Range(
    lambda v: "/" not in v and "\0" not in v and v not in (".", ".."), "a plain name, not a path"
)
HTTP = Range(lambda v: not v or v.startswith(("http://", "https://")), "an address such as http://host:port")

RANGES: dict[str, Range] = {
    "job.dump_folder": NOT_EMPTY,
    "job.name": FOLDER_NAME,
    "model.name": NOT_EMPTY,
    "model.flavor": NOT_EMPTY,
    "model.hf_assets_path": NOT_EMPTY,
    "model.vocab_size": AT_LEAST_0,
    "training.local_batch_size": AT_LEAST_1,
    "training.global_batch_size": _least(1, -1),
    "training.seq_len": AT_LEAST_1,
    "training.steps": AT_LEAST_1,
    "training.max_norm": POSITIVE,
    "training.gc_freq": AT_LEAST_1,
    "training.dataloader.num_workers": AT_LEAST_0,
    "training.dataloader.prefetch_factor": AT_LEAST_1,
    "optimizer.lr": POSITIVE,
    "optimizer.beta1": BELOW_1,
    "optimizer.beta2": BELOW_1,
    "optimizer.eps": AT_LEAST_0,
    "optimizer.weight_decay": AT_LEAST_0,
    "lr_scheduler.warmup_steps": AT_LEAST_0,
    "lr_scheduler.total_steps": AT_LEAST_1,
    "lr_scheduler.decay_ratio": SHARE,
    "lr_scheduler.min_lr_factor": SHARE,
    "parallelism.data_parallel_replicate_degree": AT_LEAST_1,
    "parallelism.data_parallel_shard_degree": _least(1, -1),
    "parallelism.tensor_parallel_degree": AT_LEAST_1,
    "parallelism.pipeline_parallel_degree": AT_LEAST_1,
    "parallelism.pipeline_parallel_first_stage_less_layers": AT_LEAST_0,
    "parallelism.pipeline_parallel_last_stage_less_layers": AT_LEAST_0,
    "parallelism.pipeline_parallel_layers_per_stage": AT_LEAST_1,
    "parallelism.pipeline_parallel_microbatch_size": AT_LEAST_1,
    "parallelism.context_parallel_degree": AT_LEAST_1,
    "parallelism.expert_parallel_degree": AT_LEAST_1,
    "checkpoint.folder": NOT_EMPTY,
    "checkpoint.interval": AT_LEAST_1,
    "checkpoint.keep_latest_k": _least(2, 0),
    "checkpoint.load_step": _least(0, -1),
    "activation_checkpoint.memory_budget": SHARE,
    "comm.init_timeout_seconds": AT_LEAST_1,
    "comm.train_timeout_seconds": AT_LEAST_1,
    "comm.trace_buf_size": AT_LEAST_0,
    "metrics.log_freq": AT_LEAST_1,
    "metrics.save_tb_folder": NOT_EMPTY,
    "profiling.profile_freq": AT_LEAST_1,
    "profiling.profiler_active": AT_LEAST_1,
    "profiling.profiler_warmup": AT_LEAST_0,
    "validation.freq": AT_LEAST_1,
    "validation.steps": _least(1, -1),
    "validation.dataloader.num_workers": AT_LEAST_0,
    "validation.dataloader.prefetch_factor": AT_LEAST_1,
    "debug.seed": AT_LEAST_0,
    "debug.pace_step_seconds": AT_LEAST_0,
    "data.seed": AT_LEAST_0,
    "data.shards": AT_LEAST_1,
    "island.id": AT_LEAST_0,
    "island.port": Range(lambda v: 0 <= v <= 65535, "from 0 to 65535"),
    "lighthouse.address": HTTP,
    "lighthouse.heartbeat_interval_s": POSITIVE,
    "lighthouse.heartbeat_timeout_s": POSITIVE,
    "lighthouse.join_timeout_s": POSITIVE,
    "lighthouse.quorum_interval_s": POSITIVE,
    "lighthouse.patience_s": POSITIVE,
    "transport.kind": NOT_EMPTY,
    "transport.exchange_timeout_s": POSITIVE,
    "semi_sync.method": NOT_EMPTY,
    "semi_sync.sync_every": AT_LEAST_1,
    "semi_sync.num_islands": AT_LEAST_1,
    "semi_sync.outer.name": NOT_EMPTY,
    "semi_sync.outer.lr": POSITIVE,
    "semi_sync.outer.momentum": BELOW_1,
    "semi_sync.merge.method": NOT_EMPTY,
}
SOURCE_RANGES: dict[str, Range] = {"path": NOT_EMPTY, "weight": POSITIVE}
"""The same for the keys of [[data.sources]]."""


def broken_ranges(config: RunConfig) -> Iterator[tuple[str, str]]:
    """(key, message) for each value outside its range; absent optional values have none."""
    for key, allowed in RANGES.items():
        yield from _range(key, get(config, key), allowed)
    for i, source in enumerate(config.data.sources):
        for name, allowed in SOURCE_RANGES.items():
            yield from _range(f"data.sources[{i}].{name}", getattr(source, name), allowed)


def _range(key: str, value: Any, allowed: Range) -> Iterator[tuple[str, str]]:
    if value is not None and not allowed.holds(value):
        yield key, f"must be {allowed.wording}, got {json.dumps(value, ensure_ascii=False)}"


def broken_relations(config: RunConfig) -> Iterator[tuple[tuple[str, ...], str]]:
    """(keys, message) for each rule between settings that does not hold; the message says what to change."""
    c = config
    steps, total = c.training.steps, c.lr_scheduler.total_steps
    if total is not None and total < steps:
        yield (
            ("lr_scheduler.total_steps", "training.steps"),
            f"({total}) is less than training.steps ({steps}): the learning rate would fall below its end value after "
            f"step {total}; raise it or lower training.steps",
        )
    pp, micro = c.parallelism.pipeline_parallel_degree, c.parallelism.pipeline_parallel_microbatch_size
    if pp > 1 and micro > 0 and c.training.local_batch_size % micro:
        yield (
            (
                "training.local_batch_size",
                "parallelism.pipeline_parallel_microbatch_size",
                "parallelism.pipeline_parallel_degree",
            ),
            f"({c.training.local_batch_size}) must be a multiple of "
            f"parallelism.pipeline_parallel_microbatch_size ({micro})",
        )
    if pp > 1 and not c.training.disable_cuda_graphs:
        yield (
            ("training.disable_cuda_graphs", "parallelism.pipeline_parallel_degree"),
            f"must be true with parallelism.pipeline_parallel_degree = {pp}: CUDA graphs cannot hold pipelines",
        )
    model_compiled = c.compile.enable and "model" in c.compile.components
    if c.activation_checkpoint.mode == "memory_budget" and not model_compiled:
        yield (
            ("activation_checkpoint.mode", "compile.enable", "compile.components"),
            '= "memory_budget" needs compile.enable = true and "model" in compile.components',
        )
    if c.parallelism.enable_async_tensor_parallel and not model_compiled:
        yield (
            ("parallelism.enable_async_tensor_parallel", "compile.enable", "compile.components"),
            'needs compile.enable = true and "model" in compile.components',
        )
    yield from _checkpoint_relations(config)
    p = c.profiling
    if p.enable_profiling and p.profile_freq < p.profiler_active + p.profiler_warmup:
        yield (
            ("profiling.profile_freq", "profiling.profiler_active", "profiling.profiler_warmup"),
            f"({p.profile_freq}) must be at least profiling.profiler_active ({p.profiler_active}) + "
            f"profiling.profiler_warmup ({p.profiler_warmup})",
        )
    beat, silence = c.lighthouse.heartbeat_interval_s, c.lighthouse.heartbeat_timeout_s
    if beat >= silence:
        yield (
            ("lighthouse.heartbeat_interval_s", "lighthouse.heartbeat_timeout_s"),
            f"({beat} s) must be less than lighthouse.heartbeat_timeout_s ({silence} s)",
        )


def _checkpoint_relations(config: RunConfig) -> Iterator[tuple[tuple[str, ...], str]]:
    c = config.checkpoint
    if c.last_save_in_hf and not c.last_save_model_only:
        yield (
            ("checkpoint.last_save_in_hf", "checkpoint.last_save_model_only"),
            "needs checkpoint.last_save_model_only = true",
        )
    if c.initial_load_in_hf and not c.initial_load_model_only:
        yield (
            ("checkpoint.initial_load_in_hf", "checkpoint.initial_load_model_only"),
            "needs checkpoint.initial_load_model_only = true",
        )
    if c.initial_load_in_hf_quantized and not (c.initial_load_in_hf and c.initial_load_path):
        yield (
            (
                "checkpoint.initial_load_in_hf_quantized",
                "checkpoint.initial_load_in_hf",
                "checkpoint.initial_load_path",
            ),
            "needs checkpoint.initial_load_in_hf = true and checkpoint.initial_load_path",
        )
    if "model" in c.exclude_from_loading:
        yield (("checkpoint.exclude_from_loading",), 'must not hold "model"')
