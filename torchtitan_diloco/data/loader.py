"""The data loader of an island: which sequences it reads, in which order, on which rank."""

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.tokenizer import BaseTokenizer

from torchtitan_diloco.data.corpus import Corpus
from torchtitan_diloco.data.corpus_size import require_batch
from torchtitan_diloco.data.order import permute
from torchtitan_diloco.data.prepare import check_fits, ensure_prepared
from torchtitan_diloco.errors import UserError

logger = logging.getLogger(__name__)
_LOOK_AHEAD = 4096  # sequences whose order is computed at once


class CorpusDataLoader(BaseDataLoader):
    """Yields what TorchTitan's text loader yields, from a prepared corpus, endlessly.

    ``({"input": int64 [B, L], "positions": int64 [B, L]}, labels int64 [B, L])``; no label is ignored, as
    sequences are full.

    Order. Epoch e of a run is the permutation ``permute(., n, seed, e)`` of the corpus' n sequences. Island i
    of N reads the places p with p % N == i; the last n % N places are read by nobody, so that every island
    has n // N an epoch. These make the island's stream, which goes on over epochs without a break. `position`
    counts its sequences, those of all ranks together: of a step's D * B sequences, rank r of D takes
    [position + r * B, position + (r + 1) * B). So the state is one number, equal on all ranks, and an island
    resumes with any number of ranks.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        path: str = ""
        """Folder of the prepared corpus."""

        prepare_from: str = ""
        """Text or JSONL file, or bundled:kjv, to prepare the corpus from if `path` is absent; "" = it must be there."""

        seed: int = 0
        """Seed of the sample order; the same for all islands of a run."""

        island_id: int = 0
        """Number of this island, from 0."""

        num_islands: int = 1
        """Number of islands among which the corpus is divided."""

        model_vocab_size: int = 0
        """Vocabulary of the model, to be checked against the corpus; 0 = not checked."""

    def __init__(
        self,
        config: Config,
        *,
        dp_world_size: int,
        dp_rank: int,
        tokenizer: BaseTokenizer,
        seq_len: int,
        local_batch_size: int,
        **_: Any,
    ) -> None:
        """Raises UserError when the corpus is absent, damaged, too small or unfit for tokenizer, seq_len or model."""
        if not config.path:
            raise UserError("data.sources.path: not set; give the folder of a prepared corpus")
        if not 0 <= config.island_id < config.num_islands:
            raise UserError(
                f"island.id: is {config.island_id}, but the run has {config.num_islands} islands "
                "(semi_sync.num_islands), numbered from 0"
            )
        folder = getattr(tokenizer, "tokenizer_path", None)
        if folder is None:
            raise UserError(
                f"model.hf_assets_path: a corpus needs TorchTitan's HuggingFaceTokenizer, "
                f"not {type(tokenizer).__name__}"
            )
        ensure_prepared(config.path, config.prepare_from, folder, seq_len)
        self.corpus = Corpus(config.path)
        check_fits(self.corpus.manifest, config.path, folder, seq_len)
        vocab_size = self.corpus.manifest.tokenizer.vocab_size
        if 0 < config.model_vocab_size < vocab_size:
            raise UserError(
                f"model.flavor: the model's vocabulary has {config.model_vocab_size} entries, but the tokenizer of "
                f"{config.path} has {vocab_size}; use a model with at least as many"
            )
        self.per_epoch = len(self.corpus) // config.num_islands
        """Sequences of this island in an epoch."""
        self.batch_size = dp_world_size * local_batch_size
        """Sequences that all ranks of the island read together for one micro-batch."""
        require_batch(
            path=config.path,
            sequences=len(self.corpus),
            seq_len=seq_len,
            num_islands=config.num_islands,
            dp_ranks=dp_world_size,
            local_batch_size=local_batch_size,
        )
        self._config = config
        self._offset, self._local_batch_size = dp_rank * local_batch_size, local_batch_size
        self._position = 0
        self._window_start, self._window = 0, np.empty(0, dtype=np.int64)

    @property
    def position(self) -> int:
        """Sequences of the island's stream handed out so far, over all ranks and epochs.

        May be set, also while iterating: the next batch then begins there.

        Raises ValueError when set to a negative number.
        """
        return self._position

    @position.setter
    def position(self, value: int) -> None:
        if value < 0:
            raise ValueError(f"position must not be negative, is {value}")
        self._position = int(value)

    @property
    def epoch(self) -> int:
        """Epoch, from 0, of the next sequence."""
        return self._position // self.per_epoch

    def sample_ids(self, position: int, count: int = 1) -> npt.NDArray[np.int64]:
        """Ids in the corpus of `count` sequences of the island's stream from `position` on: int64 [count]."""
        stream = np.arange(position, position + count, dtype=np.int64)
        epochs, within = np.divmod(stream, self.per_epoch)
        places = within * self._config.num_islands + self._config.island_id
        ids = np.empty_like(stream)
        for epoch in np.unique(epochs).tolist():
            chosen = epochs == epoch
            ids[chosen] = permute(places[chosen], len(self.corpus), seed=self._config.seed, epoch=epoch)
        return ids

    def _ids_of_rank(self) -> npt.NDArray[np.int64]:
        """The same for this rank's next batch; one array operation per window instead of hundreds per batch."""
        first = self._position + self._offset
        begin = first - self._window_start
        if begin < 0 or begin + self._local_batch_size > self._window.size:
            self._window_start, begin = first, 0
            self._window = self.sample_ids(first, max(_LOOK_AHEAD, self._local_batch_size))
        return self._window[begin : begin + self._local_batch_size]

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        while True:
            inputs, positions, labels = self.corpus.read(self._ids_of_rank())
            # Counted before it is yielded: a state taken while the batch is in use says that it has been used.
            self._position += self.batch_size
            yield (
                {"input": torch.from_numpy(inputs), "positions": torch.from_numpy(positions)},
                torch.from_numpy(labels),
            )

    def state_dict(self) -> dict[str, Any]:
        """``position`` and what it counts in; the same on every rank."""
        return {"position": self._position, "corpus": self.corpus.manifest.digest, "seed": self._config.seed}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Goes on at the saved position; an empty state changes nothing.

        Raises UserError when the state counts in another corpus.
        """
        if not state_dict:
            return
        if state_dict["corpus"] != self.corpus.manifest.digest:
            raise UserError(
                f"data.sources.path: the checkpoint was made with another corpus than {self._config.path} "
                f"(digest {state_dict['corpus'][:12]}, here {self.corpus.manifest.digest[:12]}); use that one"
            )
        if state_dict["seed"] != self._config.seed:
            logger.warning(
                "data.seed was %s in the checkpoint and is %s now", state_dict["seed"], self._config.seed
            )
        self.position = state_dict["position"]
