"""Paths of a configuration that are not there: worth a warning when a file is judged, an error when a run starts."""

from collections.abc import Iterator
from pathlib import Path

from torchtitan_diloco.config.schema import RunConfig
from torchtitan_diloco.config.tokenizer import tokenizer_folder
from torchtitan_diloco.errors import UserError


def absent_paths(config: RunConfig) -> Iterator[str]:
    """One sentence for each path that a start would not find here; remote addresses are not looked at."""
    try:
        tokenizer_folder(config.model.hf_assets_path)
    except UserError as e:
        yield str(e)
    for i, source in enumerate(config.data.sources):
        made_from = source.prepare_from
        if made_from and not made_from.startswith("bundled:") and _absent(made_from) and _absent(source.path):
            yield f'data.sources[{i}].prepare_from: "{made_from}" does not exist'
        elif not made_from and _absent(source.path):
            yield f'data.sources[{i}].path: folder "{source.path}" does not exist; make it with `data prepare`'
    for key, path in (
        ("checkpoint.initial_load_path", config.checkpoint.initial_load_path),
        ("training.dataset_path", None if config.data.sources else config.training.dataset_path),
        ("parallelism.pipeline_parallel_schedule_csv", config.parallelism.pipeline_parallel_schedule_csv),
    ):
        if path and "://" not in path and _absent(path):
            yield f'{key}: "{path}" does not exist'


def _absent(path: str) -> bool:
    try:
        return not Path(path).exists()
    except (OSError, ValueError):
        return True
