"""What a local run can get wrong and the launcher can tell at once, before any trainer spends seconds on importing."""

import errno
import socket

from torchtitan_diloco.config.schema import RunConfig
from torchtitan_diloco.errors import UserError


def require_free_port(config: RunConfig, host: str = "127.0.0.1") -> None:
    """Raises UserError where ``island.port`` cannot be had: taken, or to be shared by several islands on one machine."""
    port, islands = config.island.port, config.semi_sync.num_islands
    if not port or config.semi_sync.method == "none":
        return
    if islands > 1:
        raise UserError(
            f"island.port: is {port}, but the {islands} islands that `run` starts on this machine cannot share it; "
            "leave it out and each takes a free one"
        )
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
            probe.listen(1)
        except OSError as error:
            why = "taken" if error.errno == errno.EADDRINUSE else f"not to be had ({error.strerror})"
            raise UserError(
                f"island.port: {port} is {why} on this machine; choose another, or 0 for a free one"
            ) from None


def require_full_batches(config: RunConfig, ranks: list[int], sequences: int, path: str) -> None:
    """Raises UserError where an island's share of the corpus at ``path`` does not fill a batch of all its ranks.

    ranks: processes of each island. sequences: of the whole corpus.
    """
    from torchtitan_diloco.data.corpus_size import require_batch

    layout = config.parallelism
    per_replica = (
        layout.tensor_parallel_degree * layout.pipeline_parallel_degree * layout.context_parallel_degree
    )
    require_batch(
        path=path,
        sequences=sequences,
        seq_len=config.training.seq_len,
        num_islands=config.semi_sync.num_islands,
        dp_ranks=max(1, max(ranks) // per_replica),
        local_batch_size=config.training.local_batch_size,
    )
