"""Ranges of single values. To add one, add a line to `RANGES`."""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from torchtitan_diloco.config.fields import get, is_array_of_tables, keys
from torchtitan_diloco.config.names import nearest_choice
from torchtitan_diloco.config.problems import CONTROL
from torchtitan_diloco.config.schema import DataSource, IslandTable, RunConfig
from torchtitan_diloco.config.upstream_names import PIPELINE_SCHEDULES, is_schedule
from torchtitan_diloco.outer import names
from torchtitan_diloco.outer.shares import expand


@dataclass(frozen=True, slots=True)
class Range:
    """A test of one value and its wording: "must be ..."."""

    holds: Callable[[Any], bool]
    wording: str
    near: tuple[str, ...] = ()
    """Values of which one may have been meant."""


def _least(bound: float, *also: int) -> Range:
    words = "".join(f" or {a}" for a in also)
    return Range(lambda v: v >= bound or v in also, f"at least {bound}{words}")


def _name(setting: str) -> Range:
    """One of the names that stand for something; empty ones never do."""
    shipped = names.SHIPPED[setting]
    words = [json.dumps(name) for name in shipped]
    if setting in names.EXTENSIBLE:
        words.append("a name that an installed package registers")
    *first, last = words
    return Range(
        lambda v: names.is_known(setting, v), f"{', '.join(first)} or {last}" if first else last, shipped
    )


def shards(ranges: str) -> list[int]:
    """What ``data.sources.present`` names; nothing where it is empty or not to be read."""
    try:
        return expand(ranges)
    except ValueError:
        return []


POSITIVE = Range(lambda v: v > 0, "greater than 0")
LONGEST_S = 2_000_000
"""About three weeks. Beyond that, what counts milliseconds in 32 bits overflows, in gloo and in the Lighthouse."""
SECONDS = Range(lambda v: 0 < v <= LONGEST_S, f"greater than 0 and at most {LONGEST_S}")
WHOLE_SECONDS = Range(lambda v: 1 <= v <= LONGEST_S, f"from 1 to {LONGEST_S}")
AT_LEAST_0, AT_LEAST_1 = _least(0), _least(1)
SHARE = Range(lambda v: 0 <= v <= 1, "from 0 to 1")
BELOW_1 = Range(lambda v: 0 <= v < 1, "at least 0 and less than 1")
NOT_EMPTY = Range(lambda v: bool(v.strip()), "a non-empty string")
FOLDER_NAME = Range(
    lambda v: (
        "/" not in v
        and v not in (".", "..")
        and (not v or bool(v.strip()))
        and not CONTROL.search(v)
        # File systems take names of 255 bytes, to which temporary ones add.
        and len(v.encode("utf-8", "replace")) <= 200
    ),
    "a plain name, not a path, of at most 200 bytes, not blank and without control characters",
)


def _is_address(text: str) -> bool:
    try:
        parts = urlsplit(text)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is none
        return False


def _names_a_user(address: str) -> bool:
    """A password in an address would be in every log."""
    return "@" in urlsplit(address).netloc


def _is_place(text: str) -> bool:
    host, _, port = text.rpartition(":")
    return bool(host) and port.isascii() and port.isdigit() and int(port) <= 65535


HTTP = Range(
    lambda v: not v or (_is_address(v) and not _names_a_user(v)),
    "an address such as http://host:port, with a port from 1 to 65535 and without user or password",
)

URLS = Range(
    lambda v: all(url and _is_address(url) and not _names_a_user(url) for url in v),
    "addresses such as http://host:port, with a port from 1 to 65535 and without user or password (the place of a secret is "
    "the file that transport.token_file names)",
)

MOST_WORKERS = 64

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
    "parallelism.pipeline_parallel_schedule": Range(
        is_schedule, f"one of {', '.join(PIPELINE_SCHEDULES)}", PIPELINE_SCHEDULES
    ),
    "parallelism.pipeline_parallel_microbatch_size": AT_LEAST_1,
    "parallelism.context_parallel_degree": AT_LEAST_1,
    "parallelism.expert_parallel_degree": AT_LEAST_1,
    "checkpoint.folder": NOT_EMPTY,
    "checkpoint.interval": AT_LEAST_1,
    "checkpoint.keep_latest_k": _least(2, 0),
    "checkpoint.load_step": _least(0, -1),
    "quantize.grouped_mm.mx.pad_multiple": AT_LEAST_1,
    "activation_checkpoint.memory_budget": SHARE,
    "comm.init_timeout_seconds": WHOLE_SECONDS,
    "comm.train_timeout_seconds": WHOLE_SECONDS,
    "comm.trace_buf_size": AT_LEAST_0,
    "metrics.log_freq": AT_LEAST_1,
    "metrics.save_tb_folder": NOT_EMPTY,
    "profiling.profile_freq": AT_LEAST_1,
    "profiling.profiler_active": AT_LEAST_1,
    "profiling.profiler_warmup": AT_LEAST_0,
    "profiling.profiler_repeat": AT_LEAST_0,
    "profiling.profiler_skip_first": AT_LEAST_0,
    "profiling.profiler_skip_first_wait": AT_LEAST_0,
    "profiling.memory_snapshot_freq": AT_LEAST_1,
    "profiling.memory_snapshot_max_entries": AT_LEAST_1,
    "validation.freq": AT_LEAST_1,
    "validation.steps": _least(1, -1),
    "validation.dataloader.num_workers": AT_LEAST_0,
    "validation.dataloader.prefetch_factor": AT_LEAST_1,
    "debug.seed": AT_LEAST_0,
    "debug.pace_step_seconds": Range(lambda v: 0 <= v <= LONGEST_S, f"from 0 to {LONGEST_S}"),
    "data.seed": AT_LEAST_0,
    "island.id": AT_LEAST_0,
    "island.own_sync_every": AT_LEAST_1,
    "island.port": Range(lambda v: 0 <= v <= 65535, "from 0 to 65535"),
    "lighthouse.address": HTTP,
    "lighthouse.heartbeat_interval_s": SECONDS,
    "lighthouse.heartbeat_timeout_s": SECONDS,
    "lighthouse.join_timeout_s": SECONDS,
    "lighthouse.quorum_interval_s": SECONDS,
    "lighthouse.patience_s": SECONDS,
    **{setting: _name(setting) for setting in names.SHIPPED},
    "transport.exchange_timeout_s": SECONDS,
    "transport.urls": URLS,
    "island.advertise": Range(
        lambda v: v[:1] not in ("^", "=", "!") and "," not in v,
        "one interface or one address (NCCL's lists of interfaces mean nothing to gloo)",
    ),
    "syncer.bind": Range(_is_place, "HOST:PORT, for instance 127.0.0.1:29520"),
    "syncer.save_every": AT_LEAST_1,
    "syncer.heartbeat_timeout_s": SECONDS,
    "syncer.hang_timeout_s": SECONDS,
    "syncer.wait_s": SECONDS,
    "syncer.spools": Range(lambda v: all(v) and len(set(v)) == len(v), "folders, each named once"),
    "syncer.spool_timeout_s": SECONDS,
    "syncer.workers": Range(lambda v: 0 <= v <= MOST_WORKERS, f"from 0 to {MOST_WORKERS}"),
    "syncer.worker_port": Range(
        lambda v: 0 <= v <= 65536 - MOST_WORKERS, f"from 0 to {65536 - MOST_WORKERS}"
    ),
    "syncer.worker_urls": URLS,
    "transport.max_rate": AT_LEAST_0,
    "transport.streams": Range(lambda v: 1 <= v <= 64, "from 1 to 64"),
    "data.shards": AT_LEAST_1,
    "semi_sync.sync_every": AT_LEAST_1,
    "semi_sync.fragments": AT_LEAST_1,
    "semi_sync.overlap": AT_LEAST_0,
    "semi_sync.mix_alpha": BELOW_1,
    "semi_sync.num_islands": AT_LEAST_1,
    "semi_sync.max_failed_slots": AT_LEAST_0,
    "semi_sync.outer.lr": Range(lambda v: 0 < v <= 100, "greater than 0 and at most 100"),
    "semi_sync.outer.momentum": BELOW_1,
    "semi_sync.outer.min_lr_factor": Range(lambda v: 0 < v <= 1, "greater than 0 and at most 1"),
    "semi_sync.codec.block": Range(
        lambda v: 2 <= v <= names.LARGEST_BLOCK and v % 2 == 0,
        f"an even number from 2 to {names.LARGEST_BLOCK}",
    ),
    "semi_sync.codec.density": Range(lambda v: 0 < v <= 1, "greater than 0 and at most 1"),
}
TABLE_RANGES: dict[type, dict[str, Range]] = {
    DataSource: {
        "path": NOT_EMPTY,
        "weight": POSITIVE,
        "present": Range(
            lambda v: not v or bool(shards(v)), 'ranges of shards such as "0-31,40", or "" for all'
        ),
    },
    IslandTable: {"id": AT_LEAST_0, "nodes": AT_LEAST_1, "ranks": AT_LEAST_1},
}
"""The same for the keys of the entries of arrays of tables."""


def broken_ranges(config: RunConfig) -> Iterator[tuple[str, str]]:
    """(key, message) for each value outside its range; absent optional values have none."""
    for key, allowed in RANGES.items():
        for message in broken_range(get(config, key), allowed):
            yield key, message
    for key in filter(is_array_of_tables, keys()):
        for i, entry in enumerate(get(config, key)):
            for name, allowed in TABLE_RANGES[type(entry)].items():
                for message in broken_range(getattr(entry, name), allowed):
                    yield f"{key}[{i}].{name}", message


def broken_range(value: Any, allowed: Range) -> Iterator[str]:
    """What is wrong with one value, if anything."""
    if value is not None and not allowed.holds(value):
        meant = nearest_choice(value, allowed.near) if allowed.near else None
        hint = f"; did you mean {json.dumps(meant)}?" if meant else ""
        yield f"must be {allowed.wording}, got {json.dumps(value, ensure_ascii=False)}{hint}"
