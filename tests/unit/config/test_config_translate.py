"""TorchTitan 0.3.0 gets every setting of ours that is its own, and refuses in terms of our settings."""

import dataclasses
import re
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest
import torch

from torchtitan_diloco import cpu

cpu.install()

from torchtitan.components.checkpointer import CheckpointManager  # noqa: E402
from torchtitan.components.dataloader import BaseDataLoader  # noqa: E402
from torchtitan.components.metrics import MetricsProcessor  # noqa: E402
from torchtitan.components.optimizer import LRSchedulersContainer, OptimizersContainer  # noqa: E402
from torchtitan.components.validate import Validator  # noqa: E402
from torchtitan.config import configs as upstream  # noqa: E402
from torchtitan.distributed.activation_checkpoint import FullAC, MemoryBudgetAC, SelectiveAC  # noqa: E402
from torchtitan.hf_datasets.text_datasets import HuggingFaceTextDataLoader  # noqa: E402
from torchtitan.models.common.attention import FlexAttention, VarlenAttention  # noqa: E402
from torchtitan.tools.profiler import Profiler  # noqa: E402
from torchtitan.trainer import Trainer  # noqa: E402

from tests.helpers.config_values import changed  # noqa: E402
from torchtitan_diloco.config import schema  # noqa: E402
from torchtitan_diloco.config.fields import get, keys, kinds, put  # noqa: E402
from torchtitan_diloco.config.model import converters, model_spec, run_model  # noqa: E402
from torchtitan_diloco.config.schema import ModelConfig, RunConfig  # noqa: E402
from torchtitan_diloco.config.translate import trainer_config  # noqa: E402
from torchtitan_diloco.errors import UserError  # noqa: E402


def run_config(**settings: Any) -> RunConfig:
    config = RunConfig()
    config.job.name = "run"
    for key, value in settings.items():
        put(config, key.replace("__", "."), value)
    return config


def translated(config: RunConfig) -> str:
    """All of TorchTitan's configuration as text, without the addresses of functions, which differ from call to call."""
    found = trainer_config(Trainer.Config, config)
    text = f"{found.to_dict()} {type(found.activation_checkpoint).__qualname__}"
    return re.sub(r" at 0x[0-9a-f]+", "", text)


def test_the_same_settings_translate_to_the_same() -> None:
    """Without this the next test would prove nothing."""
    assert translated(run_config()) == translated(run_config())


OURS = (
    "data.",
    "lighthouse.",
    "transport.",
    "syncer.",
    "semi_sync.",
    "island.",
    "islands",
    "debug.pace_step_seconds",
    "debug.dump_sends",
    "debug.inject_faults",
)
"""Read by our own code."""
UNUSED = {"job.description"}
ELSEWHERE = ("job.base", "model.converters", "quantize.", "parallelism.enable_fsdp_symm_mem")
"""Tested on their own below, or in test_config_base.py: they need more than a value."""
CONTEXT: dict[str, dict[str, Any]] = {
    "checkpoint.initial_load_model_only": {"checkpoint.initial_load_path": "/seed"},
    "checkpoint.initial_load_in_hf_quantized": {
        "checkpoint.initial_load_path": "/seed",
        "checkpoint.initial_load_in_hf": True,
    },
    "checkpoint.last_save_in_hf": {"checkpoint.last_save_model_only": True},
    "parallelism.enable_async_tensor_parallel": {"compile.enable": True},
    "parallelism.expert_parallel_comm_backend": {"model.name": "deepseek_v3"},
    "activation_checkpoint.memory_budget": {
        "activation_checkpoint.mode": "memory_budget",
        "compile.enable": True,
    },
    "activation_checkpoint.visualize_memory_budget_pareto": {
        "activation_checkpoint.mode": "memory_budget",
        "compile.enable": True,
    },
    "debug.spmd_typechecking": {"activation_checkpoint.mode": "none"},
    "training.steps": {"lr_scheduler.total_steps": None},
}
"""Settings without which a key has no effect."""
VALUES: dict[str, Any] = {
    "model.name": "qwen3",
    "model.flavor": "1B",
    "optimizer.name": "Adam",
    "checkpoint.load_step": 4,
    "activation_checkpoint.mode": "full",
    "validation.steps": 4,
    "training.global_batch_size": 16,
}


def their_keys() -> list[str]:
    fixed = {k for k, kind in keys().items() if len(kind.choices) == 1}
    return [k for k in keys() if not k.startswith(OURS + ELSEWHERE) and k not in UNUSED | fixed]


@pytest.mark.parametrize("key", their_keys())
def test_every_key_of_torchtitan_has_an_effect(key: str, tmp_path: Path) -> None:
    config = run_config()
    for other, value in CONTEXT.get(key, {}).items():
        put(config, other, value)
    before = translated(config)
    if key == "model.hf_assets_path":
        (tmp_path / "tokenizer.json").write_text("{}")
        put(config, key, str(tmp_path))
    else:
        put(config, key, VALUES.get(key, changed(key)))
    assert translated(config) != before


TAKEN_ELSEWHERE = {
    "training": {"dataset": "dataloader", "dataset_path": "dataloader", "dataloader": "dataloader"},
    "parallelism": {
        "enable_async_tensor_parallel": "compile",
        "expert_parallel_comm_backend": "model_registry",
    },
    "checkpoint": {},
    "activation_checkpoint": {
        "mode": "the class",
        "per_op_sac_force_recompute_mm_shapes_by_fqns": "SelectiveAC.force_recompute_mm_shapes_by_fqns",
        "memory_budget": "MemoryBudgetAC",
        "visualize_memory_budget_pareto": "MemoryBudgetAC",
    },
    "validation": {"dataset": "dataloader", "dataset_path": "dataloader"},
    "debug": {"pace_step_seconds": "ours", "dump_sends": "ours", "inject_faults": "ours"},
}
"""Section -> keys of ours that TorchTitan 0.3.0 takes elsewhere."""
NOT_OURS = {
    "debug": {"batch_invariant", "print_config", "save_config_file"},
    "compile": {"enable_async_tensor_parallel"},
    "profiling": {"trace_post_processor"},
    "optimizer": {"param_groups", "optimizer_factory_kwargs_by_name"},
    "activation_checkpoint": {"force_recompute_mm_shapes_by_fqns"},
}
"""Section -> fields of TorchTitan 0.3.0 that have no key of the same name with us: moved, or refused in pre-training."""
SECTIONS = {
    "training": (schema.TrainingConfig, upstream.TrainingConfig, {"disable_cuda_graphs"}),
    "parallelism": (schema.ParallelismConfig, upstream.ParallelismConfig, set()),
    "compile": (schema.CompileConfig, upstream.CompileConfig, set()),
    "comm": (schema.CommConfig, upstream.CommConfig, set()),
    "debug": (schema.DebugConfig, upstream.DebugConfig, set()),
    "metrics": (schema.MetricsConfig, MetricsProcessor.Config, set()),
    "profiling": (
        schema.ProfilingConfig,
        Profiler.Config,
        {"save_traces_folder", "save_memory_snapshot_folder"},
    ),
    "checkpoint": (schema.CheckpointConfig, CheckpointManager.Config, {"last_save_model_only"}),
    "lr_scheduler": (schema.LRSchedulerConfig, LRSchedulersContainer.Config, set()),
    "activation_checkpoint": (schema.ActivationCheckpointConfig, SelectiveAC.Config, set()),
    "validation": (schema.ValidationConfig, Validator.Config, set()),
    "optimizer": (schema.OptimizerConfig, OptimizersContainer.Config, set()),
}
"""Section -> ours, TorchTitan's, and the defaults that differ (documented where they stand)."""


@pytest.mark.parametrize("section", SECTIONS)
def test_a_section_has_the_keys_and_defaults_of_the_installed_torchtitan(section: str) -> None:
    """The key table is static, for speed: a TorchTitan that adds, renames or changes a key fails here, with its name."""
    ours, theirs, differing = SECTIONS[section]
    a, b = ours(), theirs()
    our_names, their_names = ({f.name for f in dataclasses.fields(table)} for table in (ours, theirs))
    moved = set(TAKEN_ELSEWHERE.get(section, ()))
    if section == "optimizer":
        moved = {"name", "lr", "beta1", "beta2", "eps", "weight_decay"}
    assert sorted(their_names - our_names) == sorted(NOT_OURS.get(section, ())), "new in TorchTitan"
    assert sorted(our_names - their_names) == sorted(moved), "gone from TorchTitan"
    default = {n for n in our_names & their_names if n != "dataloader" and getattr(a, n) != getattr(b, n)}
    assert default == differing


@pytest.mark.parametrize("section", SECTIONS)
def test_choices_are_those_of_the_installed_torchtitan(section: str) -> None:
    ours, theirs, _ = SECTIONS[section]
    hints = get_type_hints(theirs)
    for name, kind in kinds(ours).items():
        if kind.base == "choice" and get_origin(hints.get(name)) is Literal:
            assert set(kind.choices) == set(get_args(hints[name])), f"{section}.{name}"


def test_the_loader_takes_every_key_of_its_table() -> None:
    theirs = {f.name for f in dataclasses.fields(HuggingFaceTextDataLoader.Config)}
    ours = {f.name for f in dataclasses.fields(schema.LoaderConfig)}
    assert sorted(theirs - ours) == ["dataset", "dataset_path", "infinite"]
    assert ours <= theirs


def test_converters_get_every_option_of_theirs() -> None:
    config = run_config(
        model__converters=[
            f"quantize.{kind}.{of}" for kind in ("linear", "grouped_mm") for of in ("float8", "mx")
        ],
        quantize__linear__float8__recipe_name="rowwise_with_gw_hp",
        quantize__linear__float8__filter_fqns=["lm_head"],
        quantize__linear__float8__emulate=True,
        quantize__linear__mx__fqns=["attention"],
        quantize__grouped_mm__mx__pad_multiple=128,
        compile__enable=True,
    )
    made = [dataclasses.asdict(c) for c in converters(config)]
    common = {"model_compile_enabled": True}
    assert made == [
        common | {"recipe_name": "rowwise_with_gw_hp", "filter_fqns": ["lm_head"], "emulate": True},
        common | {"fqns": ["attention"]},
        common,
        common | {"recipe_name": "mxfp8_rceil", "pad_multiple": 128},
    ]
    config.compile.components = ["loss"]
    assert not any(c.model_compile_enabled for c in converters(config))


@pytest.mark.skipif(torch.cuda.is_available(), reason="an accelerator may do it")
def test_a_conversion_that_this_machine_cannot_do_is_a_user_error() -> None:
    config = run_config(model__converters=["quantize.linear.float8"])
    with pytest.raises(UserError, match=r"^model\.converters: .*refused by TorchTitan"):
        run_model(config)


def test_numbers_arrive_where_they_belong() -> None:
    config = run_config(
        optimizer__lr=0.25,
        optimizer__beta1=0.5,
        optimizer__beta2=0.6,
        optimizer__eps=0.125,
        optimizer__weight_decay=0.75,
        island__id=3,
        training__dataset="c4",
        validation__dataset_path="/v",
        job__print_config=True,
        job__save_config_file="x.json",
        parallelism__context_parallel_load_balancer="none",
        checkpoint__initial_load_path="seed",
        profiling__profile_freq=40,
    )
    c = trainer_config(Trainer.Config, config)
    (group,) = c.optimizer.param_groups
    assert (group.pattern, group.optimizer_name) == (".*", "AdamW")
    assert group.optimizer_kwargs == {"lr": 0.25, "betas": (0.5, 0.6), "eps": 0.125, "weight_decay": 0.75}
    assert c.dump_folder == "outputs/run/island-3"
    assert (c.dataloader.dataset, c.validator.dataloader.dataset_path) == ("c4", "/v")
    assert (c.dataloader.infinite, c.validator.dataloader.infinite) == (True, False)
    assert (c.debug.print_config, c.debug.save_config_file) == (True, "x.json")
    assert c.parallelism.context_parallel_load_balancer is None
    assert c.checkpoint.initial_load_path == str(Path("seed").absolute())
    assert c.profiler.profile_freq == 40
    assert c.loss.loss_fn.global_vocab_size == c.model_spec.model.vocab_size == 2048
    assert (Path(c.hf_assets_path) / "tokenizer.json").is_file()


@pytest.mark.parametrize(
    ("mode", "expected"),
    [("none", None), ("full", FullAC), ("selective", SelectiveAC), ("memory_budget", MemoryBudgetAC)],
)
def test_the_mode_picks_the_activation_checkpoint_class(mode: str, expected: Any) -> None:
    config = run_config(activation_checkpoint__mode=mode, compile__enable=True)
    found = trainer_config(Trainer.Config, config).activation_checkpoint
    assert found is None if expected is None else type(found) is expected.Config


def test_components_of_the_caller_replace_torchtitans() -> None:
    class OurCheckpoint(CheckpointManager):
        @dataclasses.dataclass(kw_only=True, slots=True)
        class Config(CheckpointManager.Config):
            extra: int = 5

    class OurMetrics(MetricsProcessor):
        @dataclasses.dataclass(kw_only=True, slots=True)
        class Config(MetricsProcessor.Config):
            pass

    class OurLoader(BaseDataLoader):
        @dataclasses.dataclass(kw_only=True, slots=True)
        class Config(BaseDataLoader.Config):
            pass

    loader = OurLoader.Config(dataset="ours")
    c = trainer_config(
        Trainer.Config,
        run_config(checkpoint__interval=7, metrics__log_freq=3),
        checkpoint_cls=OurCheckpoint,
        metrics_cls=OurMetrics.Config,
        dataloader=loader,
    )
    assert (type(c.checkpoint), c.checkpoint.interval, c.checkpoint.extra) == (OurCheckpoint.Config, 7, 5)
    assert (type(c.metrics), c.metrics.log_freq) == (OurMetrics.Config, 3)
    assert c.dataloader is loader


def test_each_translation_has_its_own_model() -> None:
    a, b = (trainer_config(Trainer.Config, run_config()) for _ in range(2))
    assert a.model_spec.model is not b.model_spec.model
    assert a.model_spec.model.layers[0] is not b.model_spec.model.layers[0]


@pytest.mark.parametrize("name", ["llama3", "qwen3", "deepseek_v3", "gpt_oss"])
def test_the_vocabulary_can_be_set(name: str) -> None:
    model = model_spec(ModelConfig(name=name, vocab_size=61)).model
    found = {model.vocab_size, model.tok_embeddings.num_embeddings, model.lm_head.out_features}
    assert found == {61}


@pytest.mark.parametrize(
    ("flavor", "attention"),
    [
        ("debugmodel", FlexAttention),
        ("debugmodel_flex_attn", FlexAttention),
        ("debugmodel_varlen_attn", VarlenAttention),
        ("8B_varlen", VarlenAttention),
    ],
)
def test_flavors_of_v02_pick_the_attention(flavor: str, attention: Any) -> None:
    found = model_spec(ModelConfig(flavor=flavor)).model.layers[0].attention.inner_attention
    assert type(found) is attention.Config


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (
            {"model__name": "llama4"},
            r"model\.name: TorchTitan has no model \"llama4\"; there are deepseek_v3, .*llama3",
        ),
        (
            {"model__flavor": "9B"},
            r"model\.flavor: .*no flavor \"9B\"; there are debugmodel, 1B, 3B, 8B, 70B, 405B",
        ),
        ({"model__flavor": "9B_flex"}, r"model\.flavor: .*no flavor \"9B_flex\""),
        ({"model__hf_assets_path": "nowhere"}, r"model\.hf_assets_path: folder \"nowhere\" does not exist"),
        (
            {"parallelism__expert_parallel_comm_backend": "deepep"},
            r"comm_backend = \"deepep\": .* has no experts",
        ),
        ({"checkpoint__keep_latest_k": 1}, r"\[checkpoint\]: .*at least 2 checkpoint replicas"),
        ({"validation__steps": 0}, r"\[validation\]: validation steps must be positive"),
        ({"activation_checkpoint__mode": "memory_budget"}, r"Memory budget .*--compile\.enable"),
    ],
    ids=lambda v: next(iter(v)) if isinstance(v, dict) else "",
)
def test_what_torchtitan_refuses_is_a_user_error(settings: dict[str, Any], expected: str) -> None:
    with pytest.raises(UserError, match=expected):
        trainer_config(Trainer.Config, run_config(**settings))


def test_keys_with_one_choice_are_that_choice() -> None:
    single = {k: kind.choices for k, kind in keys().items() if len(kind.choices) == 1}
    assert {k: (get(RunConfig(), k),) for k in single} == single
