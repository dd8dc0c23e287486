"""From a checked TOML to the trainer's configuration."""

from dataclasses import fields
from typing import Any

from torchtitan_diloco import cpu
from torchtitan_diloco.config.load import Resolved


def trainer_config(resolved: Resolved) -> Any:
    """The ``DiLoCoTrainer.Config`` of this island. Imports TorchTitan (seconds).

    Raises UserError for what only a start can tell: missing data or tokenizer, an unknown model, a setting that this
    device cannot honour.
    """
    cpu.install()
    from torchtitan_diloco.checkpoint.manager import IslandCheckpointManager
    from torchtitan_diloco.config.agreement import agreement, lockstep_agreement
    from torchtitan_diloco.config.model import run_model
    from torchtitan_diloco.config.tokenizer import tokenizer_folder
    from torchtitan_diloco.config.translate import trainer_config as translate
    from torchtitan_diloco.data.loader import CorpusDataLoader
    from torchtitan_diloco.data.samples import source_digest
    from torchtitan_diloco.island.metrics import IslandMetrics
    from torchtitan_diloco.trainer import DiLoCoTrainer

    config = resolved.config
    shared = agreement(config)
    if config.semi_sync.method == "sync":
        shared |= lockstep_agreement(config)
        # A captured backward pass would not call FSDP's hooks again.
        config.training.disable_cuda_graphs = True
    spec = run_model(config)
    replaced: dict[str, Any] = {"model_spec": spec}
    if config.data.sources:
        folder = tokenizer_folder(config.model.hf_assets_path)
        digests = [source_digest(s, folder, config.training.seq_len) for s in config.data.sources]
        shared["data.shared"] = config.data.shared
        shared["data manifest"] = sorted(digests) if config.data.shared else []
        replaced["dataloader"] = CorpusDataLoader.Config(
            sources=config.data.sources,
            seed=config.data.seed,
            shards=config.data.shards,
            island_id=config.island.id,
            num_islands=config.semi_sync.num_islands,
            model_vocab_size=spec.model.vocab_size,
            vocab_size_is_written=config.model.vocab_size > 0,
        )
    written = {key for key, origin in resolved.origins.items() if not origin.startswith(("default", "base "))}
    ours = {f.name for f in fields(DiLoCoTrainer.Config)}
    sections = {
        name: getattr(config, name)
        for name in ("island", "lighthouse", "transport", "semi_sync")
        if name in ours
    }
    return translate(
        DiLoCoTrainer.Config,
        config,
        checkpoint_cls=IslandCheckpointManager,
        metrics_cls=IslandMetrics,
        run_name=config.job.name,
        pace_step_seconds=config.debug.pace_step_seconds,
        dump_sends=config.debug.dump_sends,
        inject_faults=config.debug.inject_faults,
        agreement=shared,
        written=frozenset(written),
        **sections,
        **replaced,
    )
