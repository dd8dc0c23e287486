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
from torchtitan_diloco.data.loader import CorpusDataLoader
from torchtitan_diloco.data.order import permute
from torchtitan_diloco.data.prepare import prepare
from torchtitan_diloco.errors import UserError

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

    def make(rank: int = 0, ranks: int = 1, *, batch: int = BATCH, seq_len: int = SEQ_LEN, **fields: object):
        config = CorpusDataLoader.Config(**{"path": str(corpus_dir)} | fields)
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
    loader = build(seed=11)
    n = len(loader.corpus)
    assert n % BATCH != 0  # so that a batch crosses the border
    wanted = np.concatenate([permute(np.arange(n), n, seed=11, epoch=epoch) for epoch in range(3)])
    got = rows(take(loader, 2 * n // BATCH))
    inputs = loader.corpus.read(wanted[: len(got)]).inputs
    assert [row[0] for row in got] == [tuple(row) for row in inputs.tolist()]
    assert loader.epoch == loader.position // n == (1 if len(got) < 2 * n else 2)
    np.testing.assert_array_equal(loader.sample_ids(5, 2 * n), wanted[5 : 5 + 2 * n])


@pytest.mark.parametrize("num_islands", [1, 2, 3, 7])
def test_islands_share_an_epoch_without_overlap_and_evenly(
    build: Callable[..., CorpusDataLoader], num_islands: int
) -> None:
    loaders = [build(island_id=i, num_islands=num_islands, batch=1) for i in range(num_islands)]
    n = len(loaders[0].corpus)
    for epoch in (0, 1):
        share = n // num_islands
        ids = [loader.sample_ids(epoch * share, share).tolist() for loader in loaders]
        together = list(itertools.chain(*ids))
        assert len(set(together)) == len(together) == share * num_islands
        left_out = permute(np.arange(share * num_islands, n), n, seed=0, epoch=epoch).tolist()
        assert sorted(together + left_out) == list(range(n))


def test_two_ranks_read_what_one_rank_with_twice_the_batch_reads(
    build: Callable[..., CorpusDataLoader],
) -> None:
    fields = {"island_id": 1, "num_islands": 2, "seed": 4}
    one = take(build(batch=2 * BATCH, **fields), 12)
    ranks = [take(build(rank, 2, **fields), 12) for rank in (0, 1)]
    for whole, first, second in zip(one, *ranks, strict=True):
        assert rows([whole]) == rows([first]) + rows([second])


@pytest.mark.parametrize("steps", [0, 1, 5, 23, 60])
def test_resume_from_any_position_yields_the_same_batches(
    build: Callable[..., CorpusDataLoader], steps: int
) -> None:
    whole = build(num_islands=2)
    batches = take(whole, steps + 10)
    saved = build(num_islands=2)
    take(saved, steps)
    resumed = build(num_islands=2)
    take(resumed, 3)  # it had gone elsewhere before
    resumed.load_state_dict(saved.state_dict())
    assert resumed.position == steps * BATCH
    assert take(resumed, 10) == batches[steps:]


def test_a_checkpoint_resumes_with_another_number_of_ranks(build: Callable[..., CorpusDataLoader]) -> None:
    loaders = [build(rank, 2) for rank in (0, 1)]
    before = [row for loader in loaders for row in rows(take(loader, 4))]
    states = [loader.state_dict() for loader in loaders]
    assert states[0] == states[1]
    after = build(0, 1)
    after.load_state_dict(states[0])
    assert sorted(before + rows(take(after, 4))) == sorted(rows(take(build(), 12)))


def test_the_position_can_be_set_while_iterating(build: Callable[..., CorpusDataLoader]) -> None:
    loader, straight = build(), build()
    iterator, expected = iter(loader), take(straight, 9)
    next(iterator)
    loader.position = 6 * BATCH  # forwards
    assert next(iterator)[0]["input"].tolist() == expected[6][0]
    loader.position = 2 * BATCH  # and back
    assert next(iterator)[0]["input"].tolist() == expected[2][0]
    with pytest.raises(ValueError, match="must not be negative"):
        loader.position = -1


def test_far_positions_cost_no_more_than_near_ones(build: Callable[..., CorpusDataLoader]) -> None:
    loader = build()
    loader.position = 10**15
    assert len(take(loader, 2)) == 2
    assert loader.epoch == (10**15 + 2 * BATCH) // len(loader.corpus)


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
        ({"island_id": 2, "num_islands": 2}, r"island\.id: is 2, but the run has 2 islands"),
        ({"island_id": -1}, r"island\.id: is -1"),
        ({"seq_len": 9}, r"training\.seq_len: is 9, but the corpus .* was prepared for 8"),
        ({"model_vocab_size": 99}, r"model\.flavor: the model's vocabulary has 99 entries, .* has 100"),
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
        CorpusDataLoader.Config(path=str(corpus_dir)).build(
            dp_world_size=1, dp_rank=0, tokenizer=tokenizer, seq_len=SEQ_LEN, local_batch_size=1
        )


def test_a_state_of_another_corpus_is_refused_and_of_another_seed_noted(
    build: Callable[..., CorpusDataLoader], caplog: pytest.LogCaptureFixture
) -> None:
    loader = build()
    state = loader.state_dict()
    loader.load_state_dict({})
    with pytest.raises(UserError, match=r"data\.sources\.path: the checkpoint was made with another corpus"):
        loader.load_state_dict(state | {"corpus": "0" * 64})
    loader.load_state_dict(state | {"seed": 5, "position": 12})
    assert loader.position == 12 and "data.seed was 5" in caplog.text
