"""Rules between settings. To add one, add a line to `RULES`."""

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torchtitan_diloco.config.fields import get
from torchtitan_diloco.config.ranges import RANGES, TABLE_RANGES, broken_range, broken_ranges
from torchtitan_diloco.config.schema import RunConfig
from torchtitan_diloco.config.table_rules import broken_tables
from torchtitan_diloco.config.upstream_names import DATASETS, is_dataset
from torchtitan_diloco.outer.names import WIRE_SETTINGS

__all__ = ["RANGES", "RULES", "TABLE_RANGES", "WORLD", "broken_range", "broken_ranges", "broken_relations"]

MESSAGE_MBIT = 8 * 1.048576
"""A message of ``exchange.bulk``."""

WORLD = "islands.ranks"
"""Stands for the number of processes of the island, in the keys of a rule; None where it is not known."""


@dataclass(frozen=True, slots=True)
class Rule:
    """A relation between the values of some keys."""

    keys: tuple[str, ...]
    """The key to blame first."""
    holds: Callable[..., bool]
    """Given the values of the keys, in order."""
    broken: str
    """What follows "<first key>: " where it does not hold; {0}, {1}, ... are the values."""


def _rule(keys: str, holds: Callable[..., bool], broken: str) -> Rule:
    return Rule(tuple(keys.split()), holds, broken)


_P = "parallelism."
_DEGREES = (
    f"{_P}data_parallel_shard_degree {_P}data_parallel_replicate_degree {_P}context_parallel_degree "
    f"{_P}tensor_parallel_degree {_P}pipeline_parallel_degree {WORLD}"
)


def _shards(
    shard: int, replicate: int, context: int, tensor: int, pipeline: int, world: int | None
) -> int | None:
    """FSDP shards, with -1 resolved; None where that takes the number of ranks, or where the degrees do not fit it."""
    if shard > 0:
        return shard
    others = replicate * context * tensor * pipeline
    return None if world is None or world % others else world // others


def _fills(shard: int, replicate: int, context: int, tensor: int, pipeline: int, world: int | None) -> bool:
    shards = _shards(shard, replicate, context, tensor, pipeline, world)
    return world is None or (shards is not None and shards * replicate * context * tensor * pipeline == world)


def _batch_fits(batch: int, local: int, *degrees: int) -> bool:
    return batch < 0 or batch % (local * degrees[1] * (_shards(*degrees) or 1)) == 0


def _experts_fit(expert: int, *degrees: int) -> bool:
    shards = _shards(*degrees)
    return shards is None or shards * degrees[2] * degrees[3] % expert == 0


def _codec_takes(setting: str) -> Callable[..., bool]:
    """What a third party's codec takes is for that to say; with sync another rule refuses it."""
    return lambda value, wire, method: (
        value is None or method == "sync" or setting in WIRE_SETTINGS.get(wire, (setting,))
    )


def _compiled(enable: bool, components: list[str]) -> bool:
    return enable and "model" in components


_MEANINGLESS_IN_LOCKSTEP: dict[str, Any] = {
    "semi_sync.fragments": 1,
    "semi_sync.fragment_by": "tensor",
    "semi_sync.module_fqns_per_fragment": None,
    "semi_sync.overlap": 0,
    "semi_sync.mix_alpha": 0.0,
    "semi_sync.merge.method": "mean",
    "semi_sync.codec.wire": "fp32",
    "semi_sync.codec.error_feedback": False,
    "semi_sync.codec.rounding": "nearest",
    "semi_sync.codec.block": None,
    "semi_sync.codec.density": None,
    "semi_sync.found": "wait_all",
    "transport.kind": "gloo",
    "transport.max_rate": 0.0,
    "transport.streams": None,
    "debug.dump_sends": False,
}
"""Key -> the one value that says what ``semi_sync.method = "sync"`` does anyway."""


def _lockstep_rule(key: str, anyway: Any) -> Rule:
    return _rule(
        f"{key} semi_sync.method",
        lambda value, method: method != "sync" or value == anyway,
        '({0}) cannot be had with semi_sync.method = "sync", which averages gradients in every step; remove it',
    )


_WRITTEN = (
    "checkpoint.folder",
    "metrics.save_tb_folder",
    "profiling.save_traces_folder",
    "profiling.save_memory_snapshot_folder",
    "comm.save_traces_folder",
    "job.save_config_file",
)
"""What TorchTitan joins with the island's folder, and an absolute path replaces."""


def _has_one_writer(path: str | None, islands: int, island: int) -> bool:
    if not path or islands == 1 or f"island-{island}" in path.split("/"):
        return True
    inside = os.path.normpath(path).split(os.sep)[0] != os.pardir
    return inside and not os.path.isabs(path) and "://" not in path


RULES: tuple[Rule, ...] = (
    *(_lockstep_rule(key, anyway) for key, anyway in _MEANINGLESS_IN_LOCKSTEP.items()),
    _rule(
        "semi_sync.fragments semi_sync.sync_every semi_sync.module_fqns_per_fragment",
        lambda fragments, every, lists: bool(lists) or fragments <= every,
        "({0} fragments) must be at most semi_sync.sync_every ({1}), in which each is sent once",
    ),
    _rule(
        "semi_sync.module_fqns_per_fragment semi_sync.sync_every",
        lambda lists, every: len(lists or ()) <= every,
        "has more lists than semi_sync.sync_every ({1}), in which each fragment is sent once",
    ),
    _rule(
        "semi_sync.module_fqns_per_fragment",
        lambda lists: sum(map(len, map(set, lists or ()))) == len(set().union(*(lists or ()))),
        "({0}) names a module in two lists; keep it in the list of the fragment that it belongs to",
    ),
    _rule(
        "semi_sync.fragments semi_sync.module_fqns_per_fragment",
        lambda fragments, lists: not lists or fragments in (1, len(lists)),
        "({0}) does not go with semi_sync.module_fqns_per_fragment, whose lists are the fragments; keep one of them",
    ),
    *(
        _rule(
            f"semi_sync.codec.{setting} semi_sync.codec.wire semi_sync.method",
            _codec_takes(setting),
            '({0}) is no setting of the codec "{1}"; remove it or choose another semi_sync.codec.wire',
        )
        for setting in ("block", "density")
    ),
    _rule(
        "transport.kind semi_sync.num_islands semi_sync.method",
        # With sync another rule refuses it, and with none it is not used.
        lambda kind, islands, method: kind != "memory" or islands == 1 or method in ("sync", "none"),
        '("memory") joins islands that live in one process, and each of these {1} is started in its own; use "gloo"',
    ),
    _rule(
        "transport.max_rate transport.exchange_timeout_s",
        lambda rate, timeout: rate == 0 or MESSAGE_MBIT / rate < timeout,
        "({0} Mbit/s) is too low: 1 MiB, which is sent at once, takes longer at that rate than "
        "transport.exchange_timeout_s ({1} s); raise one of them",
    ),
    _rule(
        "semi_sync.overlap semi_sync.sync_every",
        lambda overlap, every: overlap < every,
        "({0}) must be less than semi_sync.sync_every ({1}): a fragment is applied before it is sent again",
    ),
    _rule(
        "island.own_sync_every semi_sync.fragments semi_sync.module_fqns_per_fragment",
        lambda own, fragments, lists: own is None or own >= (len(lists) if lists else fragments),
        "({0}) must be at least the number of fragments, each of which is sent once in it: raise it or lower "
        "semi_sync.fragments",
    ),
    _rule(
        "island.own_sync_every semi_sync.overlap",
        lambda own, overlap: own is None or overlap < own,
        "({0}) must be more than semi_sync.overlap ({1}): a fragment is applied before it is sent again",
    ),
    _rule(
        "data.shards semi_sync.num_islands data.sources",
        lambda count, islands, sources: not sources or count >= islands,
        "({0}) must be at least semi_sync.num_islands ({1}), which share them out",
    ),
    *(
        _rule(
            f"{section}.dataset {used} job.base",
            # A base may have a loader of its own, which is asked for with no name.
            lambda name, used, base, needed=needed: used != needed or is_dataset(name) or (base and not name),
            '("{0}") is no data set of TorchTitan 0.3, which has ' + f"{', '.join(DATASETS)}; {remedy}",
        )
        for section, used, needed, remedy in (
            ("training", "data.sources", [], "prepare your own as [[data.sources]]"),
            ("validation", "validation.enable", True, "use one of them or switch validation off"),
        )
    ),
    *(
        _rule(
            f"{key} semi_sync.num_islands island.id",
            _has_one_writer,
            '("{0}") leads out of the island\'s folder, to where islands that see one file system would write over one '
            "another; give a relative path and move the run with job.dump_folder, or give each island a path with a folder "
            "island-{2} in it (in its [[islands]] table)",
        )
        for key in _WRITTEN
    ),
    _rule(
        "lr_scheduler.total_steps training.steps",
        lambda total, steps: total is None or total >= steps,
        "({0}) is less than training.steps ({1}): the learning rate would fall below its end value after step {0}; "
        "raise it or lower training.steps",
    ),
    _rule(
        _DEGREES,
        _fills,
        "({0}) x replicate ({1}) x context ({2}) x tensor ({3}) x pipeline ({4}) is not the island's {5} ranks; "
        "-1 takes what the others leave",
    ),
    _rule(
        f"training.global_batch_size training.local_batch_size {_DEGREES}",
        _batch_fits,
        "({0}) must be a multiple of training.local_batch_size ({1}) x the data-parallel degrees",
    ),
    _rule(
        f"{_P}expert_parallel_degree {_DEGREES}",
        _experts_fit,
        "({0}) must divide shards ({1}) x context ({3}) x tensor ({4}) ranks",
    ),
    _rule(
        f"training.seq_len {_P}tensor_parallel_degree {_P}enable_sequence_parallel {_P}context_parallel_degree",
        lambda length, tensor, split, context: (
            length % ((tensor if split else 1) * (2 * context if context > 1 else 1)) == 0
        ),
        "({0}) must be a multiple of parallelism.tensor_parallel_degree ({1}) x 2 x "
        "parallelism.context_parallel_degree ({3}) where those are used",
    ),
    _rule(
        f"training.local_batch_size {_P}pipeline_parallel_microbatch_size {_P}pipeline_parallel_degree",
        lambda batch, micro, pipeline: pipeline == 1 or batch % micro == 0,
        "({0}) must be a multiple of parallelism.pipeline_parallel_microbatch_size ({1})",
    ),
    _rule(
        f"training.disable_cuda_graphs {_P}pipeline_parallel_degree",
        lambda off, pipeline: pipeline == 1 or off,
        "must be true with parallelism.pipeline_parallel_degree = {1}: CUDA graphs cannot hold pipelines",
    ),
    _rule(
        "activation_checkpoint.mode compile.enable compile.components",
        lambda mode, *compiled: mode != "memory_budget" or _compiled(*compiled),
        '= "memory_budget" needs compile.enable = true and "model" in compile.components',
    ),
    _rule(
        f"{_P}enable_async_tensor_parallel compile.enable compile.components",
        lambda wanted, *compiled: not wanted or _compiled(*compiled),
        'needs compile.enable = true and "model" in compile.components',
    ),
    _rule(
        "quantize.linear.float8.emulate model.converters compile.enable compile.components",
        lambda emulate, used, *compiled: (
            not emulate or "quantize.linear.float8" not in used or not _compiled(*compiled)
        ),
        'does not go with compile.enable and "model" in compile.components',
    ),
    _rule(
        "training.dataloader.persistent_workers training.dataloader.num_workers",
        lambda wanted, workers: not wanted or workers > 0,
        "needs training.dataloader.num_workers above 0",
    ),
    _rule(
        "training.dataloader.prefetch_factor training.dataloader.num_workers",
        lambda ahead, workers: ahead is None or workers > 0,
        "({0}) needs training.dataloader.num_workers above 0",
    ),
    _rule(
        "checkpoint.last_save_in_hf checkpoint.last_save_model_only",
        lambda hf, model_only: not hf or model_only,
        "needs checkpoint.last_save_model_only = true",
    ),
    _rule(
        "checkpoint.initial_load_in_hf checkpoint.initial_load_model_only",
        lambda hf, model_only: not hf or model_only,
        "needs checkpoint.initial_load_model_only = true",
    ),
    _rule(
        "checkpoint.initial_load_in_hf_quantized checkpoint.initial_load_in_hf checkpoint.initial_load_path",
        lambda quantized, hf, path: not quantized or bool(hf and path),
        "needs checkpoint.initial_load_in_hf = true and checkpoint.initial_load_path",
    ),
    _rule(
        "checkpoint.exclude_from_loading",
        lambda states: "model" not in states,
        'must not hold "model"',
    ),
    _rule(
        "profiling.profile_freq profiling.profiler_active profiling.profiler_warmup profiling.enable_profiling",
        lambda freq, active, warmup, used: not used or freq >= active + warmup,
        "({0}) must be at least profiling.profiler_active ({1}) + profiling.profiler_warmup ({2})",
    ),
    *(
        _rule(
            # Other methods wait for islands in no collective of the model, see docs/architecture.md, Time-outs.
            f"transport.exchange_timeout_s {inside} semi_sync.method",
            lambda exchange, collective, method: method != "sync" or exchange < collective,
            f'({{0:g}} s) must be less than {inside} ({{1}} s) with semi_sync.method = "sync": ranks that wait for one '
            "whose peer is lost would be ended before it gives that peer up",
        )
        for inside in ("comm.train_timeout_seconds", "comm.init_timeout_seconds")
    ),
    _rule(
        "syncer.workers syncer.worker_urls",
        lambda count, urls: not count or not urls,
        "({0}) are processes that the hub starts itself, syncer.worker_urls those that it finds; give one of them",
    ),
    _rule(
        "syncer.spools syncer.workers syncer.worker_urls",
        lambda spools, count, urls: not spools or not (count or urls),
        "cannot be had with workers, which islands have to dial; remove syncer.workers and syncer.worker_urls, or the spools",
    ),
    _rule(
        "syncer.worker_secret syncer.worker_urls",
        lambda secret, urls: bool(secret) or not urls,
        "must name a file where there are syncer.worker_urls, or strangers could use those; make one with "
        "`openssl rand -hex 32` and copy it to each",
    ),
    _rule(
        "syncer.worker_urls syncer.cert",
        lambda urls, cert: not cert or all(url.startswith("https:") for url in urls),
        "must all begin with https where the hub has a certificate (syncer.cert): tokens could be read on the way to others",
    ),
    _rule(
        "syncer.heartbeat_timeout_s lighthouse.heartbeat_interval_s transport.kind",
        lambda silence, beat, kind: kind not in ("hub", "spool") or beat < silence,
        "({0} s) must be more than lighthouse.heartbeat_interval_s ({1} s), at which islands give a sign of life",
    ),
    _rule(
        "lighthouse.heartbeat_interval_s lighthouse.heartbeat_timeout_s",
        lambda beat, silence: beat < silence,
        "({0} s) must be less than lighthouse.heartbeat_timeout_s ({1} s)",
    ),
    _rule(
        "lighthouse.heartbeat_timeout_s transport.exchange_timeout_s transport.kind semi_sync.method",
        lambda silence, exchange, kind, method: kind != "gloo" or method == "none" or silence < exchange,
        "({0:g} s) must be less than transport.exchange_timeout_s ({1:g} s): exchanges would fail, again and again, "
        "before the island that they fail for is gone; lower it or raise the other",
    ),
)


def broken_relations(config: RunConfig, world: int | None = None) -> Iterator[tuple[tuple[str, ...], str]]:
    """(keys, message) for each rule that does not hold; the message says what to change.

    Rules about a value outside its own range are left out: they may not even be computable.

    Args:
        world: Processes of the island, for the rules on parallel degrees; None = not known.
    """
    outside = {key for key, _ in broken_ranges(config)}
    for rule in RULES:
        if outside.intersection(rule.keys):
            continue
        values = [world if key == WORLD else get(config, key) for key in rule.keys]
        if not rule.holds(*values):
            yield rule.keys, rule.broken.format(*values)
    for involved, message in broken_tables(config):
        if not outside.intersection(involved):
            yield involved, message
