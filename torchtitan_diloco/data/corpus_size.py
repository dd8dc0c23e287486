"""Whether a corpus suits the islands that share it, and the model; no torch, so that a launcher can ask too."""

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


def require_vocabulary(*, path: str, needed: int, size: int, written: bool) -> None:
    """Raises UserError unless the model has an embedding for every id of the corpus at ``path``.

    size: of the model's vocabulary, 0 = not known. written: it was set, and is not the flavor's own.
    """
    if 0 < size < needed and written:
        raise UserError(
            f"model.vocab_size: is {size}, but the tokenizer of {path} has {needed} entries; set it to at least as many, or "
            "to 0 for the flavor's own"
        )
    if 0 < size < needed:
        raise UserError(
            f"model.flavor: the model's vocabulary has {size} entries, but the tokenizer of {path} has {needed}; use a model "
            "with at least as many, or set model.vocab_size"
        )
