"""A TorchTitan configuration is made fit for the CPU, or refused with every reason, or left alone on an accelerator."""

import dataclasses
import logging

import pytest
import torch
from torchtitan.components.checkpoint import CheckpointManager
from torchtitan.components.dataloader import ParallelAwareDataloader
from torchtitan.components.loss import CrossEntropyLoss
from torchtitan.components.optimizer import default_adamw
from torchtitan.components.optimizer.optimizer import ParamGroupConfig
from torchtitan.models import deepseek_v3, gpt_oss, llama3, qwen3
from torchtitan.models.common.attention import FlexAttention, VarlenAttention
from torchtitan.models.common.config_utils import decoder_vocab_size
from torchtitan.trainer import Trainer

from torchtitan_diloco import cpu
from torchtitan_diloco.errors import UserError

MODELS = {
    "llama3": lambda: llama3.model_registry("debugmodel"),
    "llama3 varlen": lambda: llama3.model_registry("debugmodel", attn_backend="varlen"),
    "qwen3 moe": lambda: qwen3.model_registry("debugmodel_moe"),
    "deepseek_v3": lambda: deepseek_v3.model_registry("debugmodel"),
    "gpt_oss varlen with windows": lambda: gpt_oss.model_registry("debugmodel"),
}


def trainer_config(model="llama3"):
    spec = MODELS[model]()
    return Trainer.Config(
        model_spec=spec,
        loss=CrossEntropyLoss.Config(global_vocab_size=decoder_vocab_size(spec)),
        optimizer=default_adamw(lr=1e-3),
        checkpoint=CheckpointManager.Config(),
    )


@pytest.mark.parametrize("model", MODELS)
def test_every_inner_attention_becomes_document_sdpa(model):
    config = trainer_config(model)
    both = (FlexAttention.Config, VarlenAttention.Config)
    before = [fqn for fqn, *_ in config.model_spec.traverse(both)]
    assert before
    assert cpu.adapt_config(config, user_set={"training.mixed_precision_param"}) is True
    after = [(fqn, type(inner)) for fqn, inner, *_ in config.model_spec.traverse(both)]
    assert after == [(fqn, cpu.DocSDPA.Config) for fqn in before]


def test_gpt_oss_in_float32_is_refused_because_its_experts_compute_in_bfloat16():
    config = trainer_config("gpt_oss varlen with windows")
    with pytest.raises(UserError, match=r"training\.mixed_precision_param.*bfloat16"):
        cpu.adapt_config(config)


def test_defaults_become_fit_for_the_cpu():
    config = trainer_config()
    config.training.enable_cpu_offload = True
    config.dataloader = ParallelAwareDataloader.Config(pin_memory=True)
    cpu.adapt_config(config)
    assert config.training.disable_cuda_graphs is True
    assert config.training.enable_cpu_offload is False
    assert config.training.mixed_precision_param == "float32"
    assert config.dataloader.pin_memory is False


def test_adapting_again_changes_nothing():
    config = trainer_config()
    cpu.adapt_config(config)
    once = config.to_dict()
    cpu.adapt_config(config)
    assert config.to_dict() == once


def test_bf16_that_the_user_wrote_stays_with_a_warning(caplog):
    config = trainer_config()
    with caplog.at_level(logging.WARNING):
        cpu.adapt_config(config, user_set={"training.mixed_precision_param"})
    assert config.training.mixed_precision_param == "bfloat16"
    assert "training.mixed_precision_param" in caplog.text and "13 times slower" in caplog.text


def test_float32_that_the_user_wrote_warns_of_nothing(caplog):
    config = trainer_config()
    config.training.mixed_precision_param = "float32"
    cpu.adapt_config(config, user_set={"training.mixed_precision_param"})
    assert config.training.mixed_precision_param == "float32"
    assert [r for r in caplog.records if r.name.startswith("torchtitan_diloco")] == []


def set_muon(config):
    config.optimizer.param_groups = [ParamGroupConfig(pattern=".*", optimizer_name="DistMuon")]


def set_pinned_checkpoint(config):
    config.checkpoint = CheckpointManager.Config(enable=True, async_mode="async_with_pinned_mem")


def set_window(config):
    # The inner attention is one object for all layers, as upstream builds it.
    attention = config.model_spec.model.layers[0].attention
    attention.inner_attention = VarlenAttention.Config(window_size=(7, 0))


REFUSED = {
    "checkpoint.async_mode": set_pinned_checkpoint,
    "parallelism.context_parallel_degree": lambda c: setattr(c.parallelism, "context_parallel_degree", 2),
    "parallelism.enable_fsdp_symm_mem": lambda c: setattr(c.parallelism, "enable_fsdp_symm_mem", True),
    "parallelism.enable_async_tensor_parallel": lambda c: setattr(
        c.compile, "enable_async_tensor_parallel", True
    ),
    "profiling.enable_memory_snapshot": lambda c: setattr(c.profiler, "enable_memory_snapshot", True),
    "optimizer.implementation": lambda c: setattr(c.optimizer, "implementation", "fused_opt_states_bf16"),
    "optimizer.name": set_muon,
    "model.flavor": set_window,
}


@pytest.mark.parametrize("setting", REFUSED)
def test_accelerator_only_setting_is_refused_by_name_and_nothing_is_changed(setting):
    config = trainer_config()
    REFUSED[setting](config)
    before = config.to_dict()
    with pytest.raises(UserError) as error:
        cpu.adapt_config(config)
    (line,) = str(error.value).splitlines()
    assert setting in line
    assert config.to_dict() == before


def test_all_refusals_come_at_once():
    config = trainer_config()
    for change in REFUSED.values():
        change(config)
    with pytest.raises(UserError) as error:
        cpu.adapt_config(config)
    assert len(str(error.value).splitlines()) == len(REFUSED)


def test_model_that_torchtitan_calls_quantized_is_refused(monkeypatch):
    # The real converters need torchao, which is no dependency.
    monkeypatch.setattr("torchtitan_diloco.cpu.adapt.has_quantization", lambda model: True)
    with pytest.raises(UserError, match=r"model\.converters"):
        cpu.adapt_config(trainer_config())


def test_cuda_only_expert_communication_is_refused():
    config = trainer_config()
    config.model_spec = deepseek_v3.model_registry("debugmodel", moe_comm_backend="deepep")
    with pytest.raises(UserError, match=r"parallelism\.expert_parallel_comm_backend"):
        cpu.adapt_config(config)


def test_pinned_memory_checkpoint_is_no_problem_while_checkpoints_are_off():
    config = trainer_config()
    set_pinned_checkpoint(config)
    config.checkpoint = dataclasses.replace(config.checkpoint, enable=False)
    assert cpu.adapt_config(config) is True


def test_configuration_and_model_are_left_alone_on_an_accelerator(monkeypatch):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    config = trainer_config()
    for change in REFUSED.values():
        change(config)
    before = config.to_dict()
    assert cpu.adapt_config(config) is False
    assert config.to_dict() == before

    class Untouchable:
        def modules(self):
            raise AssertionError("the model was walked")

    cpu.adapt_model([Untouchable()])
