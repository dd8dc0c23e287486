"""A TorchTitan trainer small enough to build and train in seconds on one core, without any file.

Build it in-process with ``single_rank()`` around ``tiny_trainer_config(...).build()``.
"""

import contextlib
import os
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import numpy as np
import torch
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.loss import CrossEntropyLoss
from torchtitan.components.optimizer import default_adamw
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.distributed.pipeline_parallel import pipeline_llm
from torchtitan.models import llama3
from torchtitan.models.common import ComplexRoPE, Embedding, Linear, RMSNorm
from torchtitan.protocols.model_spec import ModelSpec
from torchtitan.trainer import Trainer

from torchtitan_diloco import cpu


class NoTokenizer(BaseTokenizer):
    """For data that is made of token ids; any use is a mistake in the test."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        """No fields."""

    def __init__(self, config: Config, *, tokenizer_path: str) -> None:
        super().__init__()

    def encode(self, *args: Any, **kwargs: Any) -> list[int]:
        raise NotImplementedError

    def decode(self, *args: Any, **kwargs: Any) -> str:
        raise NotImplementedError

    def get_vocab_size(self) -> int:
        raise NotImplementedError


class SyntheticDataLoader(BaseDataLoader):
    """Packed documents that a small model learns fast; a pure function of (seed, global position).

    Documents have 1 to ``seq_len`` tokens (or fill their row) and walk through the vocabulary by a fixed permutation,
    from a random start.
    The state is the number of rows that all ranks together have consumed, so it does not depend on the rank count.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        seed: int = 0
        vocab: int = 2048
        one_document_per_row: bool = False

    def __init__(
        self,
        config: Config,
        *,
        dp_world_size: int,
        dp_rank: int,
        tokenizer: Any,
        seq_len: int,
        local_batch_size: int,
        snapshot_every_n_steps: int | None = None,
    ) -> None:
        self.config, self.seq_len, self.batch = config, seq_len, local_batch_size
        self.dp_world_size, self.dp_rank = dp_world_size, dp_rank
        self.rows_consumed = 0
        self._next_token = np.random.default_rng([config.seed, 0]).permutation(config.vocab)

    def row(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """(tokens of length ``seq_len + 1``, their positions, restarting at 0 in each document)."""
        rng = np.random.default_rng([self.config.seed, 1, index])
        tokens, positions = [], []
        while len(tokens) <= self.seq_len:
            token = int(rng.integers(self.config.vocab))
            length = (
                self.seq_len + 1
                if self.config.one_document_per_row
                else int(rng.integers(1, self.seq_len + 1))
            )
            for position in range(length):
                tokens.append(token)
                positions.append(position)
                token = int(self._next_token[token])
        return np.array(tokens[: self.seq_len + 1]), np.array(positions[: self.seq_len + 1])

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        while True:
            first = self.rows_consumed + self.dp_rank * self.batch
            rows = [self.row(first + i) for i in range(self.batch)]
            self.rows_consumed += self.dp_world_size * self.batch
            tokens = torch.tensor(np.stack([t for t, _ in rows]))
            positions = torch.tensor(np.stack([p for _, p in rows]))
            yield {"input": tokens[:, :-1], "positions": positions[:, :-1]}, tokens[:, 1:]

    def state_dict(self) -> dict[str, Any]:
        return {"rows_consumed": self.rows_consumed}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if state_dict:
            self.rows_consumed = state_dict["rows_consumed"]


def tiny_model_spec(
    *,
    layers: int = 2,
    dim: int = 64,
    vocab: int = 2048,
    heads: int = 4,
    kv_heads: int = 2,
    tied: bool = False,
) -> ModelSpec:
    """A llama3 with fused QKV and grouped-query attention, as the large flavors, in miniature."""
    rope = ComplexRoPE.Config(dim=dim // heads, max_seq_len=4096, theta=500000, scaling="llama")
    model = llama3.Llama3Model.Config(
        dim=dim,
        vocab_size=vocab,
        enable_weight_tying=tied,
        tok_embeddings=Embedding.Config(
            num_embeddings=vocab,
            embedding_dim=dim,
            param_init=llama3._EMBEDDING_SKIP_INIT if tied else llama3._EMBEDDING_INIT,
        ),
        norm=RMSNorm.Config(normalized_shape=dim, param_init=llama3._NORM_INIT),
        lm_head=Linear.Config(
            in_features=dim, out_features=vocab, param_init=llama3._output_linear_init(dim)
        ),
        layers=llama3._build_llama3_layers(
            n_layers=layers,
            dim=dim,
            n_heads=heads,
            n_kv_heads=kv_heads,
            hidden_dim=2 * dim,
            rope=rope,
            attn_backend="flex",
        ),
    )
    return ModelSpec(
        name="llama3",
        flavor="tiny",
        model=model,
        parallelize_fn=llama3.parallelize_llama,
        pipelining_fn=pipeline_llm,
        post_optimizer_build_fn=None,
        state_dict_adapter=None,
    )


def tiny_trainer_config(
    cls: type[Any] = Trainer.Config,
    *,
    steps: int = 10,
    layers: int = 2,
    dim: int = 64,
    vocab: int = 2048,
    seq_len: int = 64,
    batch: int = 2,
    tied: bool = False,
    seed: int = 0,
    lr: float = 1e-2,
    **overrides: Any,
) -> Any:
    """A ``cls`` (a subclass of ``Trainer.Config``) of the tiny model, fit for the CPU and installed on it.

    Args:
        cls: The configuration class to make; its own fields can be given in ``overrides``.
        steps: Inner steps; seq_len in tokens; batch in rows per rank; seed of the weights and of the data.
        overrides: Any field; dotted names reach inside: ``**{"training.max_norm": 5.0}``.
    """
    cpu.install()
    spec = tiny_model_spec(layers=layers, dim=dim, vocab=vocab, tied=tied)
    config = cls(
        model_spec=spec,
        loss=CrossEntropyLoss.Config(global_vocab_size=vocab),
        optimizer=default_adamw(lr=lr),
        dataloader=SyntheticDataLoader.Config(seed=seed, vocab=vocab),
        tokenizer=NoTokenizer.Config(),
    )
    settings: dict[str, Any] = {
        "training.steps": steps,
        "training.seq_len": seq_len,
        "training.local_batch_size": batch,
        "lr_scheduler.warmup_steps": 0,
        "metrics.log_freq": 1,
        "metrics.disable_color_printing": True,
        "debug.seed": seed,
        "comm.trace_buf_size": 0,
        "activation_checkpoint": None,
    }
    for name, value in {**settings, **overrides}.items():
        *path, leaf = name.split(".")
        target = config
        for part in path:
            target = getattr(target, part)
        setattr(target, leaf, value)
    cpu.adapt_config(config, user_set=overrides)
    return config


def build_trainer(config: Any) -> Any:
    """Build the trainer of ``config`` in the current process group environment and make it fit for gloo."""
    trainer = config.build()
    cpu.adapt_model(trainer.model_parts)
    return trainer


def free_port() -> int:
    """A TCP port on the loopback that was free a moment ago."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def rank_environment(rank: int, world_size: int, port: int) -> dict[str, str]:
    """What torchrun would put into the environment of one rank."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


@contextlib.contextmanager
def single_rank() -> Iterator[None]:
    """A world of one rank in this process; tears the process group down at the end."""
    import gc

    with mock.patch.dict(os.environ, rank_environment(0, 1, free_port())):
        try:
            yield
        finally:
            if torch.distributed.is_initialized():
                torch.distributed.destroy_process_group()
            gc.enable()  # TorchTitan's trainer switches automatic collection off


def record_losses(trainer: Any) -> list[float]:
    """A list that fills with the global average loss of each logged step."""
    losses: list[float] = []
    log = trainer.metrics_processor.log

    def recording_log(step: int, global_avg_loss: float, *args: Any, **kwargs: Any) -> None:
        losses.append(float(global_avg_loss))
        log(step, global_avg_loss, *args, **kwargs)

    trainer.metrics_processor.log = recording_log
    return losses


def train_steps(trainer: Any, steps: int) -> list[float]:
    """Train ``steps`` inner steps without the trainer's own loop (no checkpoint, no closing sleep); the losses."""
    losses = record_losses(trainer)
    batches = trainer.batch_generator(trainer.dataloader)
    for _ in range(steps):
        trainer.step += 1
        trainer.train_step(batches)
    return losses
