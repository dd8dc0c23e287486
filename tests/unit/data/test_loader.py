"""The island's data loader: who reads what, and that resuming anywhere with any number of ranks changes nothing."""

import itertools
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.tokenizer import HuggingFaceTokenizer

from tests.helpers.documents import numbered_documents
from torchtitan_diloco.config.load import load_config
from torchtitan_diloco.config.own import DataSource
from torchtitan_diloco.configure import trainer_config
from torchtitan_diloco.data.loader import CorpusDataLoader
from torchtitan_diloco.data.order import permute
from torchtitan_diloco.data.prepare import prepare
from torchtitan_diloco.errors import UserError
from torchtitan_diloco.outer.shares import share_of

SEQ_LEN, BATCH = 8, 3


@pytest.fixture(scope="module")
def corpus_dir(tokenizer_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("loader")
    (folder / "input.txt").write_text("\n\n".join(numbered_documents(100)))
    prepare([folder / "input.txt"], tokenizer_dir, SEQ_LEN, folder / "corpus")
    return folder / "corpus"


@pytest.fixture(scope="module")
def build(corpus_dir: Path, tokenizer_dir: Path) -> Callable[..., CorpusDataLoader]:
    tokenizer = HuggingFaceTokenizer(tokenizer_path=str(tokenizer_dir))

    def make(
        rank: int = 0,
        ranks: int = 1,
        *,
        batch: int = BATCH,
        seq_len: int = SEQ_LEN,
        path: str = str(corpus_dir),
        prepare_from: str = "",
        present: str = "",
        others: tuple[DataSource, ...] = (),
        **fields: object,
    ):
        first = DataSource(path=path, prepare_from=prepare_from, present=present)
        config = CorpusDataLoader.Config(sources=[first, *others], **fields)
        return config.build(
            dp_world_size=ranks,
            dp_rank=rank,
            tokenizer=tokenizer,
            seq_len=seq_len,
            local_batch_size=batch,
            snapshot_every_n_steps=1,
        )

    return make


def take(loader: CorpusDataLoader, count: int) -> list[tuple[list, list, list]]:
    return [
        (batch["input"].tolist(), batch["positions"].tolist(), labels.tolist())
        for batch, labels in itertools.islice(loader, count)
    ]


def rows(batches: list[tuple[list, list, list]]) -> list[tuple]:
    """Single sequences, hashable."""
    return [tuple(map(tuple, row)) for batch in batches for row in zip(*batch, strict=True)]


def test_it_is_a_torchtitan_dataloader_with_its_tensors(build: Callable[..., CorpusDataLoader]) -> None:
    loader = build()
    assert isinstance(loader, BaseDataLoader)
    batch, labels = next(iter(loader))
    assert set(batch) == {"input", "positions"}
    for tensor in (*batch.values(), labels):
        assert tensor.dtype == torch.int64 and tensor.shape == (BATCH, SEQ_LEN) and tensor.is_contiguous()
    starts = batch["positions"] == 0
    assert starts[:, 0].all()
    assert torch.equal(batch["input"][:, 1:] == 0, starts[:, 1:])  # a document begins with BOS (id 0)
    followed = ~starts[:, 1:]
    assert torch.equal(labels[:, :-1][followed], batch["input"][:, 1:][followed])
    assert (labels[:, :-1][~followed] == 1).all()  # before the next document: EOS


def test_an_epoch_reads_the_seeded_order_and_the_next_epoch_follows(
    build: Callable[..., CorpusDataLoader],
) -> None:
    """One island that reads all shards goes through each epoch's permutation place by place."""
    loader = build(seed=11, shards=16)
    source, corpus = loader.sources[0], loader.samples[0]
    n = len(corpus)
    assert n % BATCH != 0 and n % 16 != 0  # so that a batch crosses the border, and shards differ in size
    wanted = np.concatenate([permute(np.arange(n), n, seed=source.seed, epoch=epoch) for epoch in range(3)])
    got = rows(take(loader, 2 * n // BATCH + 1))
    inputs = corpus.read(wanted[: len(got)]).inputs
    assert [row[0] for row in got] == [tuple(row) for row in inputs.tolist()]
    assert loader.epoch == 2


@pytest.mark.parametrize("num_islands", [1, 2, 3, 7])
def test_founding_islands_share_an_epoch_without_overlap(
    build: Callable[..., CorpusDataLoader], num_islands: int
) -> None:
    everybody = range(num_islands)
    together: list[tuple] = []
    for island in everybody:
        loader = build(island_id=island, num_islands=num_islands, batch=1, shards=7)
        share = share_of(island, loader.holds(), dict.fromkeys(everybody), 0, everybody)
        assert not share.guest
        loader.assign(dict.fromkeys(share.streams, 0))
        count = sum(loader.sources[0].size(int(name.split("/")[1])) for name in share.streams)
        together += rows(take(loader, count))
        assert loader.epoch == 1
    n = len(loader.samples[0])
    assert sorted(row[0] for row in together) == sorted(
        map(tuple, loader.samples[0].read(np.arange(n)).inputs.tolist())
    )


def test_two_ranks_read_what_one_rank_with_twice_the_batch_reads(
    build: Callable[..., CorpusDataLoader],
) -> None:
    fields = {"island_id": 1, "seed": 4}
    one = take(build(batch=2 * BATCH, **fields), 12)
    ranks = [take(build(rank, 2, **fields), 12) for rank in (0, 1)]
    for whole, first, second in zip(one, *ranks, strict=True):
        assert rows([whole]) == rows([first]) + rows([second])


@pytest.mark.parametrize("steps", [0, 1, 5, 23, 60])
def test_resume_from_any_position_yields_the_same_batches(
    build: Callable[..., CorpusDataLoader], steps: int
) -> None:
    whole = build()
    batches = take(whole, steps + 10)
    saved = build()
    take(saved, steps)
    resumed = build()
    take(resumed, 3)  # it had gone elsewhere before
    resumed.load_state_dict(saved.state_dict())
    assert sum(resumed.positions().values()) == steps * BATCH
    assert take(resumed, 10) == batches[steps:]


def test_a_checkpoint_resumes_with_another_number_of_ranks(build: Callable[..., CorpusDataLoader]) -> None:
    loaders = [build(rank, 2) for rank in (0, 1)]
    before = [row for loader in loaders for row in rows(take(loader, 4))]
    states = [loader.state_dict() for loader in loaders]
    assert states[0] == states[1]
    after = build(0, 1)
    after.load_state_dict(states[0])
    assert sorted(before + rows(take(after, 4))) == sorted(rows(take(build(), 12)))


@pytest.mark.parametrize("workers", [0, 1])
def test_resume_in_the_second_epoch_of_twenty_samples_reads_exactly_what_is_left(
    workers: int, tokenizer_dir: Path, tmp_path: Path
) -> None:
    """As a run builds its loader, which has no worker processes whatever the settings say, and so nothing fetched ahead."""
    documents = numbered_documents(400)
    for count in range(1, 400):
        (tmp_path / "input.txt").write_text("\n\n".join(documents[:count]))
        manifest = prepare([tmp_path / "input.txt"], tokenizer_dir, SEQ_LEN, tmp_path / f"corpus-{count}") \
            if sum(len(d.split()) + 1 for d in documents[:count]) >= 20 * SEQ_LEN else None  # fmt: skip
        if manifest is not None:
            break
    assert manifest is not None and manifest.counts.sequences == 20
    file = tmp_path / "run.toml"
    file.write_text(
        f'[model]\nhf_assets_path = "{tokenizer_dir}"\n[training]\nseq_len = {SEQ_LEN}\nlocal_batch_size = 1\n'
        f'[[data.sources]]\npath = "{tmp_path}/corpus-{count}"\n'
    )
    config = trainer_config(load_config(file, ["--training.dataloader.num_workers", str(workers)]))
    tokenizer = config.tokenizer.build(tokenizer_path=config.hf_assets_path)

    def build() -> CorpusDataLoader:
        return config.dataloader.build(
            dp_world_size=1, dp_rank=0, tokenizer=tokenizer, seq_len=SEQ_LEN, local_batch_size=1,
            snapshot_every_n_steps=1,
        )  # fmt: skip

    everything = sorted(map(tuple, build().samples[0].read(np.arange(20)).inputs.tolist()))
    for stop in range(21, 40):
        before = build()
        seen = rows(take(before, stop))[20:]
        after = build()
        after.load_state_dict(before.state_dict())
        rest = rows(take(after, 40 - stop))
        assert sorted(row[0] for row in seen + rest) == everything
        assert [r[0] for r in seen + rest] != everything  # shuffled


def test_streams_can_change_hands_while_iterating(build: Callable[..., CorpusDataLoader]) -> None:
    loader = build(batch=1, shards=4)
    iterator = iter(loader)
    for _ in range(6):
        next(iterator)
    before = loader.positions()
    assert sum(before.values()) == 6 and set(before.values()) == {1, 2}
    name = sorted(before)[2]
    loader.assign({name: 5})
    for _ in range(3):
        next(iterator)
    assert loader.positions() == {name: 8}
    with pytest.raises(ValueError, match="must not be negative"):
        loader.assign({name: -1})


def test_far_positions_cost_no_more_than_near_ones(build: Callable[..., CorpusDataLoader]) -> None:
    loader = build()
    loader.assign(dict.fromkeys(loader.positions(), 10**15))
    assert len(take(loader, 2)) == 2
    assert loader.epoch >= 10**15 // len(loader.samples[0])


def test_a_batch_that_stays_in_use_is_not_overwritten(build: Callable[..., CorpusDataLoader]) -> None:
    loader = build()
    iterator = iter(loader)
    batch, labels = next(iterator)
    kept = batch["input"].clone(), labels.clone()
    batch["input"].fill_(99)
    next(iterator)
    fresh, _ = next(iter(build()))
    assert torch.equal(fresh["input"], kept[0]) and torch.equal(labels, kept[1])  # the file is untouched


def test_an_absent_corpus_is_prepared_on_first_use(
    build: Callable[..., CorpusDataLoader], corpus_dir: Path, tmp_path: Path
) -> None:
    source = corpus_dir.parent / "input.txt"
    made = build(path=str(tmp_path / "new" / "corpus"), prepare_from=str(source))
    assert take(made, 5) == take(build(), 5)
    with pytest.raises(UserError, match="no prepared corpus"):
        build(path=str(tmp_path / "other"))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"path": ""}, r"data\.sources\.path: not set"),
        ({"shards": 2, "num_islands": 3}, r"data\.shards: is 2, but the run has 3 islands"),
        ({"seq_len": 9}, r"training\.seq_len: is 9, but the corpus .* was prepared for 8"),
        ({"model_vocab_size": 99}, r"model\.flavor: the model's vocabulary has 99 entries, .* has 100"),
        (
            {"model_vocab_size": 99, "vocab_size_is_written": True},
            r"model\.vocab_size: is 99, but the tokenizer of .* has 100 entries; set it to at least as many",
        ),
        (
            {"batch": 50, "num_islands": 2},
            r"data\.sources\.path: .* sequences of 8 tokens, 4\d for each of 2 islands: fewer than one batch of 50 "
            r"\(1 ranks x training\.local_batch_size 50\)",
        ),
        ({"batch": 25, "ranks": 4}, r"fewer than one batch of 100 \(4 ranks x"),
    ],
)
def test_what_does_not_fit_is_refused(
    build: Callable[..., CorpusDataLoader], fields: dict, message: str
) -> None:
    with pytest.raises(UserError, match=message):
        build(**fields)


def test_another_tokenizer_is_refused(corpus_dir: Path, make_tokenizer: Callable[..., Path]) -> None:
    tokenizer = HuggingFaceTokenizer(tokenizer_path=str(make_tokenizer("no bos")))
    with pytest.raises(UserError, match=r"model\.hf_assets_path: the tokenizer .* is not the one"):
        CorpusDataLoader.Config(sources=[DataSource(path=str(corpus_dir))]).build(
            dp_world_size=1, dp_rank=0, tokenizer=tokenizer, seq_len=SEQ_LEN, local_batch_size=1
        )


def test_a_state_of_another_corpus_order_or_number_of_shards_is_refused(
    build: Callable[..., CorpusDataLoader],
) -> None:
    loader = build()
    state = loader.state_dict()
    loader.load_state_dict({})
    with pytest.raises(UserError, match=r"data\.sources\.path: the checkpoint was made with another corpus"):
        loader.load_state_dict(state | {"positions": '{"000000000000/3": 5}'})
    with pytest.raises(UserError, match=r"data\.seed: was 5 in the checkpoint and is 0 now"):
        loader.load_state_dict(state | {"seed": 5})
    with pytest.raises(UserError, match=r"data\.shards: was 8 in the checkpoint and is 64 now"):
        loader.load_state_dict(state | {"shards": 8})
    with pytest.raises(UserError, match=r"no positions by stream"):
        loader.load_state_dict({"position": 12})


def test_the_same_corpus_twice_is_refused(build: Callable[..., CorpusDataLoader], corpus_dir: Path) -> None:
    with pytest.raises(UserError, match="hold the same sequences"):
        build(others=(DataSource(path=str(corpus_dir)),))


@pytest.mark.parametrize("ranges", ["0-64", "x", "5-2", "64"])
def test_shards_that_are_none_are_refused(build: Callable[..., CorpusDataLoader], ranges: str) -> None:
    with pytest.raises(UserError, match=r"data\.sources\.present: "):
        build(present=ranges)
