"""From a checked TOML to the trainer's configuration."""

from dataclasses import fields
from typing import Any

from torchtitan_diloco import cpu
from torchtitan_diloco.config.load import Resolved
from torchtitan_diloco.data.manifest import load_manifest
from torchtitan_diloco.data.prepare import ensure_prepared
from torchtitan_diloco.errors import UserError


def trainer_config(resolved: Resolved) -> Any:
    """The ``DiLoCoTrainer.Config`` of this island. Imports TorchTitan (seconds).

    Raises UserError for what only a start can tell: missing data or tokenizer, an unknown model, a setting that this
    device cannot honour.
    """
    cpu.install()
    from torchtitan_diloco.checkpoint.manager import IslandCheckpointManager
    from torchtitan_diloco.config.agreement import agreement
    from torchtitan_diloco.config.model import run_model
    from torchtitan_diloco.config.tokenizer import tokenizer_folder
    from torchtitan_diloco.config.translate import trainer_config as translate
    from torchtitan_diloco.data.loader import CorpusDataLoader
    from torchtitan_diloco.island.metrics import IslandMetrics
    from torchtitan_diloco.trainer import DiLoCoTrainer

    config = resolved.config
    shared = agreement(config)
    spec = run_model(config)
    replaced: dict[str, Any] = {"model_spec": spec}
    sources = config.data.sources
    if len(sources) > 1:
        raise UserError(f"data.sources: {len(sources)} tables; mixtures are not supported yet, keep one")
    if sources:
        source = sources[0]
        ensure_prepared(
            source.path,
            source.prepare_from,
            tokenizer_folder(config.model.hf_assets_path),
            config.training.seq_len,
        )
        shared["data manifest"] = load_manifest(source.path).digest
        replaced["dataloader"] = CorpusDataLoader.Config(
            path=source.path,
            prepare_from=source.prepare_from,
            seed=config.data.seed,
            island_id=config.island.id,
            num_islands=config.semi_sync.num_islands,
            model_vocab_size=spec.model.vocab_size,
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
        agreement=shared,
        written=frozenset(written),
        **sections,
        **replaced,
    )
