"""From our configuration to TorchTitan 0.3.0's: fills every field of a ``Trainer.Config`` subclass.

TorchTitan is imported inside the functions: it costs seconds, and on a CPU the caller installs its device first.
"""

from dataclasses import fields
from pathlib import Path
from typing import Any

from torchtitan_diloco.config.fields import get
from torchtitan_diloco.config.model import is_model_of_base, model_spec, run_model
from torchtitan_diloco.config.refusal import refused_by_torchtitan
from torchtitan_diloco.config.schema import CheckpointConfig, RunConfig, TrainingConfig, ValidationConfig
from torchtitan_diloco.config.tokenizer import tokenizer_folder
from torchtitan_diloco.config.upstream_table import base_config, optimizer_values
from torchtitan_diloco.errors import UserError

__all__ = ["island_folder", "model_spec", "run_folder", "trainer_config"]


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
    base = base_config(c.job.base) if c.job.base else None
    if "model_spec" not in given:
        given["model_spec"] = run_model(config)
    if "hf_assets_path" not in given:
        given["hf_assets_path"] = str(tokenizer_folder(c.model.hf_assets_path))

    def fill(name: str, component: type, section: Any, **other: Any) -> None:
        if name not in given:
            with refused_by_torchtitan(name):
                given[name] = _copy(_config_class(component), section, getattr(base, name, None), **other)

    for name in ("tokenizer", "override") if base else ():
        given.setdefault(name, getattr(base, name))
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
    fill(
        "optimizer",
        optimizer_cls or OptimizersContainer,
        c.optimizer,
        param_groups=_param_groups(config, base),
    )
    fill("lr_scheduler", lr_scheduler_cls or LRSchedulersContainer, c.lr_scheduler)
    t, v = c.training, c.validation
    if "dataloader" not in given:
        given["dataloader"] = _loader(t, base.dataloader if base else None, infinite=True)
    validation_loader = _loader(v, base.validator.dataloader if base else None, infinite=False)
    fill("validator", validator_cls or Validator, v, dataloader=validation_loader)
    if "activation_checkpoint" not in given:
        given["activation_checkpoint"] = _activation_checkpoint(config, base)
    if "loss" not in given:
        vocabulary = given["model_spec"].model.vocab_size
        if base is not None and loss_cls is None and is_model_of_base(config, base):
            given["loss"] = _with_vocabulary(base.loss, vocabulary)
        else:
            inner = _config_class(loss_cls or CrossEntropyLoss)(global_vocab_size=vocabulary)
            given["loss"] = ChunkedLossWrapper.Config(loss_fn=inner)
    with refused_by_torchtitan():
        return cls(**given)


def run_folder(config: RunConfig) -> Path:
    """``<job.dump_folder>/<job.name>``, as written (relative to the working directory if it is)."""
    return Path(config.job.dump_folder) / config.job.name


def island_folder(config: RunConfig) -> Path:
    """This island's folder in the run folder; TorchTitan's dump folder."""
    return run_folder(config) / f"island-{config.island.id}"


def _param_groups(config: RunConfig, base: Any) -> list[Any]:
    from torchtitan.components.optimizer import ParamGroupConfig

    o = config.optimizer
    kwargs = {"lr": o.lr, "betas": (o.beta1, o.beta2), "eps": o.eps, "weight_decay": o.weight_decay}
    if base is not None:
        groups: list[Any] = base.optimizer.param_groups
        if all(get(config, key) == value for key, value in optimizer_values(groups[-1]).items()):
            return groups
        if len(groups) > 1:
            raise UserError(
                f'optimizer: job.base = "{config.job.base}" has {len(groups)} parameter groups, which [optimizer] '
                "cannot change; remove name, lr, beta1, beta2, eps and weight_decay"
            )
    return [ParamGroupConfig(pattern=r".*", optimizer_name=o.name, optimizer_kwargs=kwargs)]


def _activation_checkpoint(config: RunConfig, base: Any) -> Any:
    from torchtitan.distributed.activation_checkpoint import FullAC, MemoryBudgetAC, SelectiveAC

    section = config.activation_checkpoint
    if section.mode == "none":
        return None
    target = {"selective": SelectiveAC, "full": FullAC, "memory_budget": MemoryBudgetAC}[section.mode].Config
    start = getattr(base, "activation_checkpoint", None)
    fqns = {}
    if section.mode == "selective":
        fqns["force_recompute_mm_shapes_by_fqns"] = list(section.per_op_sac_force_recompute_mm_shapes_by_fqns)
    return _copy(target, section, start if isinstance(start, target) else None, **fqns)


def _loader(section: TrainingConfig | ValidationConfig, start: Any, *, infinite: bool) -> Any:
    """TorchTitan's text loader; that of a base which is of another class stays unless a data set is named."""
    from torchtitan.hf_datasets.text_datasets import HuggingFaceTextDataLoader

    target, named = HuggingFaceTextDataLoader.Config, section.dataset != type(section)().dataset
    if start is not None and type(start) is not target and not named:
        return _copy(type(start), section.dataloader, start, dataset_path=section.dataset_path)
    return _copy(
        target,
        section.dataloader,
        dataset=section.dataset,
        dataset_path=section.dataset_path,
        infinite=infinite,
    )


def _with_vocabulary(loss: Any, size: int) -> Any:
    """The loss of a base, for a vocabulary that may not be the base's."""
    inner = getattr(loss, "loss_fn", loss)
    inner.global_vocab_size = size
    return loss


def _config_class(component: type) -> Any:
    """``component.Config`` for a component, a config class as it is."""
    return getattr(component, "Config", component)


def _copy(target: Any, section: Any, start: Any = None, **other: Any) -> Any:
    """Instance of the dataclass ``target``: what ``start`` says, under what ``section`` says, under ``other``."""
    theirs = {f.name for f in fields(target) if f.init}
    values: dict[str, Any] = {}
    for source in filter(None, (start, section)):
        values |= {f.name: getattr(source, f.name) for f in fields(source) if f.name in theirs}
    values = {name: list(v) if isinstance(v, list) else v for name, v in values.items()}
    return target(**(values | other))


def _none(value: str) -> str | None:
    return None if value == "none" else value


def _initial_load_model_only(checkpoint: CheckpointConfig) -> bool:
    """Its default without anything to load makes TorchTitan warn at every start."""
    wanted = checkpoint.initial_load_path is not None or checkpoint.initial_load_in_hf
    return checkpoint.initial_load_model_only and wanted


def _absolute(path: str | None) -> str | None:
    """TorchTitan takes absolute paths and remote URIs only."""
    return path if path is None or "://" in path else str(Path(path).absolute())
