"""What the launcher refuses before it starts anything."""

import socket
from collections.abc import Iterator

import pytest

from torchtitan_diloco.cli.local import checks
from torchtitan_diloco.config.schema import RunConfig
from torchtitan_diloco.errors import UserError


@pytest.fixture
def config() -> RunConfig:
    return RunConfig()


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as holder:
        yield holder.getsockname()[1]


def test_a_taken_port_is_refused_and_a_free_one_is_not_held(config: RunConfig, taken_port: int) -> None:
    config.island.port = taken_port
    with pytest.raises(UserError, match=rf"island.port: {taken_port} is taken"):
        checks.require_free_port(config)
    with socket.create_server(("127.0.0.1", 0)) as other:
        config.island.port = other.getsockname()[1]
    checks.require_free_port(config)
    checks.require_free_port(config)


def test_islands_of_one_machine_cannot_share_a_port(config: RunConfig) -> None:
    config.island.port, config.semi_sync.num_islands = 23456, 2
    with pytest.raises(UserError, match=r"island.port: is 23456, but the 2 islands"):
        checks.require_free_port(config)


def test_the_largest_island_must_get_a_batch_out_of_its_share_of_the_corpus(config: RunConfig) -> None:
    config.training.local_batch_size, config.semi_sync.num_islands = 4, 2
    checks.require_full_batches(config, [2, 1], 16, "corpus")
    with pytest.raises(
        UserError, match=r"data.sources.path: corpus has 15 sequences .* fewer than one batch of 8"
    ):
        checks.require_full_batches(config, [2, 1], 15, "corpus")
    config.parallelism.tensor_parallel_degree = 2
    checks.require_full_batches(config, [2, 1], 8, "corpus")
