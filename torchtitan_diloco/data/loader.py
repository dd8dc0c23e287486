"""The data loader of an island: the samples of the streams it reads, cut over its ranks."""

import json
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
import torch
import tyro
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.tokenizer import BaseTokenizer

from torchtitan_diloco.config.own import DataSource
from torchtitan_diloco.data.corpus import Sequences
from torchtitan_diloco.data.corpus_size import require_batch, require_vocabulary
from torchtitan_diloco.data.samples import Samples, open_samples
from torchtitan_diloco.data.streams import NAME_LENGTH, Source, check_streams
from torchtitan_diloco.data.walk import Walk
from torchtitan_diloco.errors import UserError

logger = logging.getLogger(__name__)


class CorpusDataLoader(BaseDataLoader):
    """Yields what TorchTitan's text loader yields, from prepared corpora, endlessly.

    ``({"input": int64 [B, L], "positions": int64 [B, L]}, labels int64 [B, L])``; no label is ignored, as
    sequences are full.

    Which samples: those of the streams assigned last (see ``outer.shares``; at first all that this island may read), in
    the order of ``mixture``. Of a step's D * B samples, rank r of D takes [r * B, (r + 1) * B). So the state is a position
    per stream, equal on all ranks, and an island resumes with any number of ranks. There are no worker processes and
    nothing is fetched ahead, so a state says exactly what was handed out.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        sources: Annotated[list[DataSource], tyro.conf.Suppress] = field(default_factory=list)
        """Corpora, with their shares."""

        seed: int = 0
        """Seed of the sample order; the same for all islands of a run."""

        shards: int = 64
        """Into how many shards each source is cut; the same for all islands of a run."""

        island_id: int = 0
        """Number of this island, from 0."""

        num_islands: int = 1
        """Number of islands among which the corpora are divided at first."""

        model_vocab_size: int = 0
        """Vocabulary of the model, to be checked against the corpora; 0 = not checked."""

        vocab_size_is_written: bool = False
        """Whether that is model.vocab_size, and not the flavor's own."""

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
        """Raises UserError when a corpus is absent, damaged, too small or unfit for tokenizer, seq_len or model."""
        if not config.sources or not all(source.path for source in config.sources):
            raise UserError("data.sources.path: not set; give the folder of a prepared corpus")
        if config.shards < config.num_islands:
            raise UserError(
                f"data.shards: is {config.shards}, but the run has {config.num_islands} islands "
                "(semi_sync.num_islands); give at least as many shards"
            )
        folder = getattr(tokenizer, "tokenizer_path", None)
        if folder is None:
            raise UserError(
                f"model.hf_assets_path: a corpus needs TorchTitan's HuggingFaceTokenizer, "
                f"not {type(tokenizer).__name__}"
            )
        self._config = config
        self.samples: list[Samples] = [open_samples(source, folder, seq_len) for source in config.sources]
        self.batch_size = dp_world_size * local_batch_size
        """Sequences that all ranks of the island read together for one micro-batch."""
        self._check(seq_len, dp_world_size, local_batch_size)
        self.sources = [_cut(s, o, config) for s, o in zip(config.sources, self.samples, strict=True)]
        _check_names(config.sources, self.sources)
        self._seq_len = seq_len
        self._first, self._count = dp_rank * local_batch_size, local_batch_size
        self.walk = Walk(self.sources, self.batch_size, phase=config.island_id)

    # ---- what the trainer asks -------------------------------------------------------------------------------------

    def holds(self) -> dict[str, str]:
        """The shards this island may read, by source."""
        return self.walk.holds()

    def positions(self) -> dict[str, int]:
        """How far each stream is that this island reads, over all ranks and epochs."""
        return self.walk.positions()

    def assign(self, positions: Mapping[str, int]) -> None:
        """Read these streams, from these positions on; also while iterating: the next batch then comes from them."""
        self.walk.assign(positions)

    def describe(self) -> dict[str, Any]:
        """What the ledger must know to turn positions into samples."""
        names = {s.name: (s, o.path) for s, o in zip(self.sources, self._config.sources, strict=True)}
        sources = {
            name: {"path": path, "samples": source.samples, "shards": source.shards}
            for name, (source, path) in names.items()
        }
        return {"seed": self._config.seed, "sources": sources}

    @property
    def epoch(self) -> int:
        """Epoch, from 0, of the stream that has come least far."""
        return self.walk.epoch()

    # ---- TorchTitan's interface ------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        while True:
            # Counted before it is yielded: a state taken while the batch is in use says that it has been used.
            source, ids, _ = self.walk.next_batch(self._first, self._count)
            inputs, positions, labels = self._read(source, ids)
            yield (
                {"input": torch.from_numpy(inputs), "positions": torch.from_numpy(positions)},
                torch.from_numpy(labels),
            )

    def _read(self, source: npt.NDArray[np.int64], ids: npt.NDArray[np.int64]) -> Sequences:
        used = np.unique(source)
        if len(used) == 1:
            return self.samples[used[0]].read(ids)
        whole = Sequences(*(np.empty((len(ids), self._seq_len), dtype=np.int64) for _ in range(3)))
        for index in used:
            here = source == index
            for target, part in zip(whole, self.samples[index].read(ids[here]), strict=True):
                target[here] = part
        return whole

    def state_dict(self) -> dict[str, Any]:
        """Positions by stream (as JSON: the number of entries varies) and what they count in; the same on every rank."""
        config = self._config
        return {"positions": json.dumps(self.positions()), "seed": config.seed, "shards": config.shards}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Goes on at the saved positions; an empty state changes nothing.

        Raises UserError when the state counts in another corpus, in other shards or in another order.
        """
        if not state_dict:
            return
        if "positions" not in state_dict:
            raise UserError(
                "checkpoint.folder: the checkpoint has no positions by stream (it is of an earlier release); "
                "choose another job.name, or another checkpoint.load_step"
            )
        config = self._config
        for key in ("seed", "shards"):
            if state_dict[key] != (here := getattr(config, key)):
                raise UserError(
                    f"data.{key}: was {state_dict[key]} in the checkpoint and is {here} now, so its samples "
                    "could not be told from new ones; set it back"
                )
        positions: dict[str, int] = json.loads(state_dict["positions"])
        if unknown := check_streams(positions, self.sources):
            raise UserError(
                f"data.sources.path: the checkpoint was made with another corpus (digest {unknown[0].split('/')[0]}; "
                f"here {', '.join(source.name for source in self.sources)}); use that one"
            )
        self.walk.assign(positions)

    # ---- checks ----------------------------------------------------------------------------------------------------

    def _check(self, seq_len: int, ranks: int, local_batch_size: int) -> None:
        config = self._config
        for source, samples in zip(config.sources, self.samples, strict=True):
            require_vocabulary(
                path=source.path,
                needed=samples.vocab_size,
                size=config.model_vocab_size,
                written=config.vocab_size_is_written,
            )
        require_batch(
            path=", ".join(source.path for source in config.sources),
            sequences=sum(map(len, self.samples)),
            seq_len=seq_len,
            num_islands=config.num_islands,
            dp_ranks=ranks,
            local_batch_size=local_batch_size,
        )


def _cut(source: DataSource, samples: Samples, config: CorpusDataLoader.Config) -> Source:
    try:
        return Source.cut(
            samples.digest,
            len(samples),
            shards=config.shards,
            seed=config.seed,
            weight=source.weight,
            present=source.present,
        )
    except ValueError as error:
        raise UserError(f"data.sources.present: {error} (data.shards)") from None


def _check_names(given: list[DataSource], sources: list[Source]) -> None:
    first: dict[str, str] = {}
    for table, source in zip(given, sources, strict=True):
        if source.name in first:
            raise UserError(
                f"data.sources: {table.path} and {first[source.name]} hold the same sequences (digest begins with "
                f"{source.name[:NAME_LENGTH]}); keep one of them, with a larger weight"
            )
        first[source.name] = table.path
