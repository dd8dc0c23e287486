"""From our configuration to TorchTitan 0.3.0's: fills every field of a ``Trainer.Config`` subclass.

TorchTitan is imported inside the functions: it costs seconds, and on a CPU the caller installs its device first.
"""

import importlib
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

from torchtitan_diloco.config.schema import CheckpointConfig, LoaderConfig, ModelConfig, RunConfig
from torchtitan_diloco.config.tokenizer import tokenizer_folder
from torchtitan_diloco.errors import UserError

_ATTENTION_SUFFIXES = {"_flex_attn": "flex", "_flex": "flex", "_varlen_attn": "varlen", "_varlen": "varlen"}
"""v0.2 named the attention in the flavor; 0.3.0 passes it to the registry."""


def trainer_config(
    cls: type,
    config: RunConfig,
    *,
    checkpoint_cls: type | None = None,
    metrics_cls: type | None = None,
    optimizer_cls: type | None = None,
    lr_scheduler_cls: type | None = None,
    validator_cls: type | None = None,
    profiler_cls: type | None = None,
    loss_cls: type | None = None,
    **replace: Any,
) -> Any:
    """An instance of ``cls``, a subclass of ``torchtitan.trainer.Trainer.Config``.

    Args:
        cls: Config class of the trainer.
        config: Checked configuration. Paths in it are resolved against the working directory.
        checkpoint_cls, metrics_cls, ...: Component classes in place of TorchTitan's, each a subclass with a nested
            ``Config`` of its own (or that ``Config``); filled from ``config`` like TorchTitan's own.
        replace: Fields of ``cls`` given as they are, for instance ``dataloader=MyLoader.Config(...)``.

    Raises:
        UserError: unknown model, flavor or tokenizer, or a combination that TorchTitan refuses.
    """
    from torchtitan.components.checkpointer import CheckpointManager
    from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss
    from torchtitan.components.metrics import MetricsProcessor
    from torchtitan.components.optimizer import LRSchedulersContainer, OptimizersContainer
    from torchtitan.components.validate import Validator
    from torchtitan.config.configs import (
        CommConfig,
        CompileConfig,
        DebugConfig,
        ParallelismConfig,
        TrainingConfig,
    )
    from torchtitan.tools.profiler import Profiler

    c = config
    given = dict(replace)
    if "model_spec" not in given:
        given["model_spec"] = model_spec(c.model, c.parallelism.expert_parallel_comm_backend)
    if "hf_assets_path" not in given:
        given["hf_assets_path"] = str(tokenizer_folder(c.model.hf_assets_path))

    def fill(name: str, component: type, section: Any, **other: Any) -> None:
        if name not in given:
            with _refused_by_torchtitan(name):
                given[name] = _copy(_config_class(component), section, **other)

    given.setdefault("dump_folder", str(island_folder(config)))
    fill("training", TrainingConfig, c.training)
    fill(
        "parallelism",
        ParallelismConfig,
        c.parallelism,
        context_parallel_load_balancer=_none(c.parallelism.context_parallel_load_balancer),
    )
    fill(
        "compile",
        CompileConfig,
        c.compile,
        enable_async_tensor_parallel=c.parallelism.enable_async_tensor_parallel,
    )
    fill("comm", CommConfig, c.comm)
    fill("metrics", metrics_cls or MetricsProcessor, c.metrics)
    fill("profiler", profiler_cls or Profiler, c.profiling)
    fill(
        "checkpoint",
        checkpoint_cls or CheckpointManager,
        c.checkpoint,
        initial_load_path=_absolute(c.checkpoint.initial_load_path),
        initial_load_model_only=_initial_load_model_only(c.checkpoint),
    )
    fill(
        "debug",
        DebugConfig,
        c.debug,
        print_config=c.job.print_config,
        save_config_file=c.job.save_config_file,
    )
    fill("optimizer", optimizer_cls or OptimizersContainer, c.optimizer, param_groups=_param_groups(config))
    fill("lr_scheduler", lr_scheduler_cls or LRSchedulersContainer, c.lr_scheduler)
    t, v = c.training, c.validation
    if "dataloader" not in given:
        given["dataloader"] = _loader(t.dataset, t.dataset_path, t.dataloader, infinite=True)
    validation_loader = _loader(v.dataset, v.dataset_path, v.dataloader, infinite=False)
    fill("validator", validator_cls or Validator, v, dataloader=validation_loader)
    if "activation_checkpoint" not in given:
        given["activation_checkpoint"] = _activation_checkpoint(config)
    if "loss" not in given:
        vocabulary = given["model_spec"].model.vocab_size
        inner = _config_class(loss_cls or CrossEntropyLoss)(global_vocab_size=vocabulary)
        given["loss"] = ChunkedLossWrapper.Config(loss_fn=inner)
    with _refused_by_torchtitan():
        return cls(**given)


def run_folder(config: RunConfig) -> Path:
    """``<job.dump_folder>/<job.name>``, as written (relative to the working directory if it is)."""
    return Path(config.job.dump_folder) / config.job.name


def island_folder(config: RunConfig) -> Path:
    """This island's folder in the run folder; TorchTitan's dump folder."""
    return run_folder(config) / f"island-{config.island.id}"


def model_spec(model: ModelConfig, moe_comm_backend: str = "standard") -> Any:
    """A fresh TorchTitan ``ModelSpec`` (trainers mutate theirs).

    Raises:
        UserError: unknown model or flavor, naming what there is.
    """
    from torchtitan.models import _supported_models
    from torchtitan.models.common.decoder import Decoder

    if model.name not in _supported_models:
        raise UserError(
            f'model.name: TorchTitan has no model "{model.name}"; there are {", ".join(sorted(_supported_models))}'
        )
    try:
        module = importlib.import_module(f"torchtitan.models.{model.name}")
    except ModuleNotFoundError as e:
        raise UserError(
            f'model.name: TorchTitan\'s "{model.name}" needs the package "{e.name}"; install it'
        ) from e
    registry = module.model_registry
    flavors = _flavors(module)
    flavor, options = model.flavor, {}
    suffix = next((s for s in _ATTENTION_SUFFIXES if flavor.endswith(s)), None)
    if flavor not in flavors and suffix:
        flavor, options = flavor.removesuffix(suffix), {"attn_backend": _ATTENTION_SUFFIXES[suffix]}
    if flavor not in flavors:
        raise UserError(
            f'model.flavor: model "{model.name}" has no flavor "{model.flavor}"; there are {", ".join(flavors)}'
        )
    if moe_comm_backend != "standard":
        if "moe_comm_backend" not in inspect.signature(registry).parameters:
            raise UserError(
                f'parallelism.expert_parallel_comm_backend = "{moe_comm_backend}": model "{model.name}" '
                'has no experts; set it to "standard"'
            )
        options["moe_comm_backend"] = moe_comm_backend
    with _refused_by_torchtitan("model"):
        spec = registry(flavor, **options)
    if not isinstance(spec.model, Decoder.Config):
        raise UserError(f'model.name: "{model.name}" is not a decoder language model')
    if model.vocab_size:
        _set_vocabulary(spec, model.vocab_size)
    return spec


def _flavors(module: Any) -> list[str]:
    tables = [
        v
        for k, v in vars(module).items()
        if k.endswith("_configs") and isinstance(v, dict) and all(map(callable, v.values()))
    ]
    return [flavor for table in tables for flavor in table]


def _set_vocabulary(spec: Any, size: int) -> None:
    if not hasattr(spec.model.tok_embeddings, "num_embeddings") or not hasattr(
        spec.model.lm_head, "out_features"
    ):
        raise UserError(
            f'model.vocab_size: the vocabulary of model "{spec.name}" cannot be changed; set it to 0'
        )
    spec.model.vocab_size = size
    spec.model.tok_embeddings.num_embeddings = size
    spec.model.lm_head.out_features = size


def _param_groups(config: RunConfig) -> list[Any]:
    from torchtitan.components.optimizer import ParamGroupConfig

    o = config.optimizer
    kwargs = {"lr": o.lr, "betas": (o.beta1, o.beta2), "eps": o.eps, "weight_decay": o.weight_decay}
    return [ParamGroupConfig(pattern=r".*", optimizer_name=o.name, optimizer_kwargs=kwargs)]


def _activation_checkpoint(config: RunConfig) -> Any:
    from torchtitan.distributed.activation_checkpoint import FullAC, MemoryBudgetAC, SelectiveAC

    section = config.activation_checkpoint
    if section.mode == "none":
        return None
    if section.mode == "selective":
        fqns = list(section.per_op_sac_force_recompute_mm_shapes_by_fqns)
        return _copy(SelectiveAC.Config, section, force_recompute_mm_shapes_by_fqns=fqns)
    return _copy({"full": FullAC, "memory_budget": MemoryBudgetAC}[section.mode].Config, section)


def _loader(dataset: str, path: str | None, loader: LoaderConfig, *, infinite: bool) -> Any:
    from torchtitan.hf_datasets.text_datasets import HuggingFaceTextDataLoader

    return _copy(
        HuggingFaceTextDataLoader.Config, loader, dataset=dataset, dataset_path=path, infinite=infinite
    )


def _config_class(component: type) -> Any:
    """``component.Config`` for a component, a config class as it is."""
    return getattr(component, "Config", component)


def _copy(target: Any, section: Any, **other: Any) -> Any:
    """Instance of the dataclass ``target`` from the fields that ``section`` has under the same name, and ``other``."""
    theirs = {f.name for f in fields(target)}
    same = {
        f.name: getattr(section, f.name) for f in fields(section) if f.name in theirs and f.name not in other
    }
    values = {name: list(v) if isinstance(v, list) else v for name, v in same.items()}
    return target(**values, **other)


def _none(value: str) -> str | None:
    return None if value == "none" else value


def _initial_load_model_only(checkpoint: CheckpointConfig) -> bool:
    """Its default without anything to load makes TorchTitan warn at every start."""
    wanted = checkpoint.initial_load_path is not None or checkpoint.initial_load_in_hf
    return checkpoint.initial_load_model_only and wanted


def _absolute(path: str | None) -> str | None:
    """TorchTitan takes absolute paths and remote URIs only."""
    return path if path is None or "://" in path else str(Path(path).absolute())


@contextmanager
def _refused_by_torchtitan(section: str = "") -> Iterator[None]:
    """Checks in TorchTitan's dataclasses are about settings: pass their wording on as a `UserError`."""
    ours = {"profiler": "profiling", "validator": "validation"}.get(section, section)
    try:
        yield
    except (ValueError, AssertionError) as e:
        text = f"[{ours}]: {e}" if ours else str(e)
        raise UserError(f"{text} (refused by TorchTitan)") from e
