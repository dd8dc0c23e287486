"""Whether a corpus is large enough for the islands that share it; no torch, so that a launcher can ask too."""

from torchtitan_diloco.errors import UserError


def require_batch(
    *, path: str, sequences: int, seq_len: int, num_islands: int, dp_ranks: int, local_batch_size: int
) -> None:
    """Raises UserError unless an island's share of the corpus holds one batch of all its data-parallel ranks."""
    share, batch = sequences // num_islands, dp_ranks * local_batch_size
    if share < batch:
        raise UserError(
            f"data.sources.path: {path} has {sequences} sequences of {seq_len} tokens, "
            f"{share} for each of {num_islands} islands: fewer than one batch of {batch} "
            f"({dp_ranks} ranks x training.local_batch_size {local_batch_size}); "
            "use more text, smaller batches or a smaller training.seq_len"
        )
