"""TorchTitan's model spec from our [model], [quantize] and the expert-parallel backend. Imports TorchTitan lazily."""

import importlib
import inspect
from typing import Any

from torchtitan_diloco.config.refusal import refused_by_torchtitan
from torchtitan_diloco.config.schema import ModelConfig, RunConfig
from torchtitan_diloco.config.upstream import ATTENTION_SUFFIXES
from torchtitan_diloco.config.upstream_table import base_config, comm_backend
from torchtitan_diloco.errors import UserError


def run_model(config: RunConfig) -> Any:
    """The model spec of a run: that of job.base, with its conversions, where the settings name the same model.

    Raises:
        UserError: as `model_spec`, and as `upstream_table.base_config`.
    """
    base = base_config(config.job.base) if config.job.base else None
    if base is None or not is_model_of_base(config, base):
        return model_spec(config.model, config.parallelism.expert_parallel_comm_backend, converters(config))
    if config.model.vocab_size:
        _set_vocabulary(base.model_spec, config.model.vocab_size)
    return base.model_spec


def is_model_of_base(config: RunConfig, base: Any) -> bool:
    """Whether the settings name the model of ``base``, TorchTitan's own config of job.base."""
    spec = base.model_spec
    named = (config.model.name, config.model.flavor, config.parallelism.expert_parallel_comm_backend)
    return not config.model.converters and named == (spec.name, spec.flavor, comm_backend(spec))


def model_spec(
    model: ModelConfig, moe_comm_backend: str = "standard", conversions: list[Any] | None = None
) -> Any:
    """A fresh TorchTitan ``ModelSpec`` (trainers mutate theirs).

    Raises:
        UserError: unknown model or flavor, naming what there is; a conversion that this machine cannot do.
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
    known = flavors(module)
    flavor = model.flavor
    options: dict[str, Any] = {}
    suffix = next((s for s in ATTENTION_SUFFIXES if flavor.endswith(s)), None)
    if flavor not in known and suffix:
        flavor, options = flavor.removesuffix(suffix), {"attn_backend": ATTENTION_SUFFIXES[suffix]}
    if flavor not in known:
        raise UserError(
            f'model.flavor: model "{model.name}" has no flavor "{model.flavor}"; there are {", ".join(known)}'
        )
    if moe_comm_backend != "standard":
        if "moe_comm_backend" not in inspect.signature(registry).parameters:
            raise UserError(
                f'parallelism.expert_parallel_comm_backend = "{moe_comm_backend}": model "{model.name}" '
                'has no experts; set it to "standard"'
            )
        options["moe_comm_backend"] = moe_comm_backend
    if conversions:
        options["converters"] = conversions
    with refused_by_torchtitan("model.converters" if conversions else "model"):
        spec = registry(flavor, **options)
    if not isinstance(spec.model, Decoder.Config):
        raise UserError(f'model.name: "{model.name}" is not a decoder language model')
    if model.vocab_size:
        _set_vocabulary(spec, model.vocab_size)
    return spec


def converters(config: RunConfig) -> list[Any]:
    """Configs of TorchTitan's model converters, in the order of model.converters."""
    if not config.model.converters:
        return []
    from torchtitan.components import quantization as theirs

    dense, experts = config.quantize.linear, config.quantize.grouped_mm
    compiled = config.compile.enable and "model" in config.compile.components
    made = {
        "quantize.linear.float8": lambda: theirs.Float8LinearConverter.Config(
            recipe_name=dense.float8.recipe_name,
            filter_fqns=list(dense.float8.filter_fqns),
            emulate=dense.float8.emulate,
            model_compile_enabled=compiled,
        ),
        "quantize.linear.mx": lambda: theirs.MXFP8LinearConverter.Config(
            fqns=list(dense.mx.fqns), model_compile_enabled=compiled
        ),
        "quantize.grouped_mm.float8": lambda: theirs.Float8GroupedExpertsConverter.Config(
            model_compile_enabled=compiled
        ),
        "quantize.grouped_mm.mx": lambda: theirs.MXFP8GroupedExpertsConverter.Config(
            recipe_name=experts.mx.recipe_name,
            pad_multiple=experts.mx.pad_multiple,
            model_compile_enabled=compiled,
        ),
    }
    return [made[name]() for name in config.model.converters]


def flavors(module: Any) -> list[str]:
    """Flavors in the registry of one of TorchTitan's model modules."""
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
