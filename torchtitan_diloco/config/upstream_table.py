"""Asks the installed TorchTitan for its models and for the values of its config functions, in our own keys.

``python -m torchtitan_diloco.config.upstream_table`` writes the table that `config/upstream.py` answers from.
"""

import importlib
import importlib.metadata
import inspect
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from typing import Any

from torchtitan_diloco.config.fields import get, keys, sections
from torchtitan_diloco.config.schema import RunConfig
from torchtitan_diloco.config.upstream_names import TEXT_MODELS
from torchtitan_diloco.errors import UserError

_SECTIONS = {"profiling": "profiler", "validation": "validator"}
"""Ours -> TorchTitan's, where the names differ."""
_OWN = {"debug.pace_step_seconds", "debug.dump_sends", "debug.inject_faults"}


def base_functions() -> dict[str, Callable[[], Any]]:
    """Name for job.base -> TorchTitan's function, in the order of its modules."""
    found = {}
    for model in TEXT_MODELS:
        module = importlib.import_module(f"torchtitan.models.{model}.config_registry")
        for name, function in vars(module).items():
            ours = inspect.isfunction(function) and function.__module__ == module.__name__
            if ours and not name.startswith("_") and not inspect.signature(function).parameters:
                found[f"{model}.{name}"] = function
    return found


def base_config(name: str) -> Any:
    """A fresh ``Trainer.Config`` from the function that job.base names.

    Raises:
        UserError: no such function, or what it needs is not installed or not there on this machine.
    """
    function = base_functions().get(name)
    if function is None:
        raise UserError(f'job.base: TorchTitan has no config function "{name}"')
    try:
        return function()
    except (ImportError, ValueError) as e:
        raise UserError(f'job.base = "{name}": {e} (refused by TorchTitan)') from e


def values_of(config: Any) -> dict[str, Any]:
    """Dotted key -> value for every key of ours that a ``Trainer.Config`` decides."""
    found: dict[str, Any] = {
        "model.name": config.model_spec.name,
        "model.flavor": config.model_spec.flavor,
        "model.hf_assets_path": config.hf_assets_path,
        "parallelism.expert_parallel_comm_backend": comm_backend(config.model_spec),
        "parallelism.enable_async_tensor_parallel": config.compile.enable_async_tensor_parallel,
        "activation_checkpoint.mode": _ac_mode(config.activation_checkpoint),
        "job.print_config": config.debug.print_config,
        "job.save_config_file": config.debug.save_config_file,
    }
    for section, table in sections().items():
        target = getattr(config, _SECTIONS.get(section, section), None)
        if "." not in section and target is not None:
            shared = {f.name for f in fields(table)} & {f.name for f in fields(target)}
            found |= {f"{section}.{name}": getattr(target, name) for name in shared}
    for section, loader in (("training", config.dataloader), ("validation", config.validator.dataloader)):
        names = {f.name for f in fields(loader)}
        for name in names & {"dataset", "dataset_path"}:
            found[f"{section}.{name}"] = getattr(loader, name)
        for name in names & {f.name for f in fields(sections()[f"{section}.dataloader"])}:
            found[f"{section}.dataloader.{name}"] = getattr(loader, name)
    fqns = getattr(config.activation_checkpoint, "force_recompute_mm_shapes_by_fqns", None)
    if fqns is not None:
        found["activation_checkpoint.per_op_sac_force_recompute_mm_shapes_by_fqns"] = fqns
    if found["parallelism.context_parallel_load_balancer"] is None:
        found["parallelism.context_parallel_load_balancer"] = "none"
    found |= optimizer_values(config.optimizer.param_groups[-1])
    return {key: found[key] for key in keys() if key in found and key not in _OWN}


def optimizer_values(group: Any) -> dict[str, Any]:
    """Our optimizer keys of one of TorchTitan's parameter groups."""
    options = group.optimizer_kwargs
    return {
        "optimizer.name": group.optimizer_name,
        "optimizer.lr": options["lr"],
        "optimizer.beta1": options["betas"][0],
        "optimizer.beta2": options["betas"][1],
        "optimizer.eps": options["eps"],
        "optimizer.weight_decay": options["weight_decay"],
    }


def comm_backend(spec: Any) -> str:
    """What parallelism.expert_parallel_comm_backend says of a model spec."""
    from torchtitan.models.common import token_dispatcher as dispatch

    backends = {
        dispatch.DeepEPTokenDispatcher.Config: "deepep",
        dispatch.HybridEPTokenDispatcher.Config: "hybridep",
        dispatch.MinimalAsyncEPTokenDispatcher.Config: "minimal_async_ep",
    }
    for _, found, *_ in spec.traverse(tuple(backends)):
        return next(name for kind, name in backends.items() if isinstance(found, kind))
    return "standard"


def _ac_mode(section: Any) -> str:
    from torchtitan.distributed.activation_checkpoint import FullAC, MemoryBudgetAC, SelectiveAC

    modes = {FullAC.Config: "full", MemoryBudgetAC.Config: "memory_budget", SelectiveAC.Config: "selective"}
    return modes.get(type(section), "none")


@contextmanager
def without_hardware() -> Iterator[None]:
    """Let config functions run where torchao or their accelerator is missing: models come without the conversion.

    Nothing that our keys say depends on it.
    """
    modules = [importlib.import_module(f"torchtitan.models.{model}.config_registry") for model in TEXT_MODELS]
    originals = [module.model_registry for module in modules]

    def plain(registry: Callable[..., Any]) -> Callable[..., Any]:
        def build(flavor: str, **options: Any) -> Any:
            options.pop("converters", None)
            if options.get("attn_backend") == "flex_flash":
                del options["attn_backend"]
            return registry(flavor, **options)

        return build

    for module, original in zip(modules, originals, strict=True):
        module.model_registry = plain(original)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        for module, original in zip(modules, originals, strict=True):
            module.model_registry = original  # type: ignore[attr-defined]


def make_table() -> dict[str, Any]:
    """The content of assets/torchtitan.json, for the installed TorchTitan. Takes seconds."""
    from torchtitan_diloco import cpu

    cpu.install()
    from torchtitan.models import _supported_models

    from torchtitan_diloco.config.model import flavors

    with without_hardware():
        values = {name: values_of(function()) for name, function in base_functions().items()}
    default = RunConfig()
    decided = [key for key in keys() if any(key in of_one for of_one in values.values())]
    return {
        "torchtitan": importlib.metadata.version("torchtitan"),
        "models": {
            name: flavors(importlib.import_module(f"torchtitan.models.{name}")) if name in TEXT_MODELS else []
            for name in sorted(_supported_models)
        },
        "keys": decided,
        "bases": {
            name: {key: value for key, value in of_one.items() if value != get(default, key)}
            for name, of_one in values.items()
        },
    }


if __name__ == "__main__":
    from torchtitan_diloco.config.upstream import TABLE

    TABLE.write_text(json.dumps(make_table(), indent=1) + "\n", encoding="utf-8")
