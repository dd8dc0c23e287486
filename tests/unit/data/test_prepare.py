"""Preparing a corpus: deterministic, complete or absent, once even with many callers, and clear about what is wrong."""

import copy
import errno
import gzip
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.helpers.documents import numbered_documents
from torchtitan_diloco.data import fits, sources
from torchtitan_diloco.data import prepare as prepare_module
from torchtitan_diloco.data.corpus import Corpus
from torchtitan_diloco.data.prepare import ensure_prepared, load_manifest, prepare, verify
from torchtitan_diloco.errors import UserError

SEQ_LEN = 16


@pytest.fixture
def corpus_dir(text_file: Path, tokenizer_dir: Path, tmp_path: Path) -> Path:
    prepare([text_file], tokenizer_dir, SEQ_LEN, tmp_path / "corpus")
    return tmp_path / "corpus"


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def assert_nothing_but(folder: Path, *names: str) -> None:
    assert sorted(os.listdir(folder)) == sorted(names)


def test_the_same_input_gives_the_same_bytes_anywhere(
    text_file: Path, tokenizer_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = prepare([text_file], tokenizer_dir, SEQ_LEN, tmp_path / "a" / "corpus")
    (tmp_path / "elsewhere").mkdir()
    moved = shutil.copy(text_file, tmp_path / "elsewhere")
    # Other piece sizes must not show either; they stand for another machine.
    monkeypatch.setattr(sources, "BATCH_DOCUMENTS", 7)
    second = prepare([moved], tokenizer_dir, SEQ_LEN, tmp_path / "b" / "other name")
    assert contents(tmp_path / "a" / "corpus") == contents(tmp_path / "b" / "other name")
    assert first == second and first.digest == second.digest


def test_the_digest_knows_contents_not_packaging(
    text_file: Path, tokenizer_dir: Path, tmp_path: Path
) -> None:
    plain = prepare([text_file], tokenizer_dir, SEQ_LEN, tmp_path / "plain")
    lines = [json.dumps({"body": text}) for text in text_file.read_text().strip().split("\n\n")]
    packed = tmp_path / "x.jsonl.gz"
    packed.write_bytes(gzip.compress("\n".join(lines).encode()))
    same = prepare(
        [packed],
        shutil.copytree(tokenizer_dir, tmp_path / "tok"),
        SEQ_LEN,
        tmp_path / "json",
        text_key="body",
    )
    assert same.digest == plain.digest
    text_file.write_text(text_file.read_text().replace("w", "w", 1).replace("w1", "w2", 1))
    assert prepare([text_file], tokenizer_dir, SEQ_LEN, tmp_path / "changed").digest != plain.digest
    assert (
        prepare([packed], tokenizer_dir, SEQ_LEN + 1, tmp_path / "longer", text_key="body").digest
        != plain.digest
    )


def test_counts_and_files_are_in_the_manifest(corpus_dir: Path, text_file: Path) -> None:
    manifest = load_manifest(corpus_dir)
    predictions = sum(len(text.split()) + 1 for text in numbered_documents(300))
    counts = manifest.counts
    assert counts.documents == 300
    assert (counts.sequences, counts.dropped_tokens) == divmod(predictions, SEQ_LEN)
    assert counts.tokens == counts.sequences * SEQ_LEN
    assert {record.name for record in manifest.files} | {"manifest.json"} == set(os.listdir(corpus_dir))
    assert manifest.sources[0].bytes == text_file.stat().st_size
    assert verify(corpus_dir) == manifest


def test_several_files_follow_one_another(tokenizer_dir: Path, tmp_path: Path) -> None:
    texts = numbered_documents(40)
    for name, part in (("1.txt", texts[:15]), ("2.txt", texts[15:]), ("all.txt", texts)):
        (tmp_path / name).write_text("\n\n".join(part))
    split = prepare([tmp_path / "1.txt", tmp_path / "2.txt"], tokenizer_dir, SEQ_LEN, tmp_path / "split")
    assert split.digest == prepare([tmp_path / "all.txt"], tokenizer_dir, SEQ_LEN, tmp_path / "whole").digest


def test_hugging_face_datasets_opens_the_folder(corpus_dir: Path) -> None:
    from datasets import load_from_disk

    dataset, corpus = load_from_disk(str(corpus_dir)), Corpus(corpus_dir)
    assert len(dataset) == len(corpus)
    assert str(dataset.features["tokens"].feature.dtype) == "uint16"
    row = dataset[5]
    assert row["tokens"][:-1] == corpus.read(np.array([5])).inputs[0].tolist()
    assert [c for c in range(SEQ_LEN) if corpus.read(np.array([5])).inputs[0, c] == 0] == row["starts"]


def test_documents_are_taken_in_pieces_of_bounded_size(
    tokenizer_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So memory does not grow with the number of documents."""
    (tmp_path / "input.txt").write_text("\n\n".join(numbered_documents(2000)))
    monkeypatch.setattr(sources, "BATCH_CHARACTERS", 2000)
    sizes, encode = [], prepare_module.CorpusTokenizer.encode

    def spy(self: object, texts: list[str]) -> object:
        sizes.append(sum(map(len, texts)))
        return encode(self, texts)

    monkeypatch.setattr(prepare_module.CorpusTokenizer, "encode", spy)
    prepare([tmp_path / "input.txt"], tokenizer_dir, SEQ_LEN, tmp_path / "corpus")
    assert len(sizes) > 10 and max(sizes) < 2100


def test_preparing_again_does_nothing_and_other_contents_are_refused(
    corpus_dir: Path, text_file: Path, tokenizer_dir: Path, make_tokenizer: Callable[..., Path]
) -> None:
    before = {file: file.stat().st_mtime_ns for file in corpus_dir.iterdir()}
    assert prepare([text_file], tokenizer_dir, SEQ_LEN, corpus_dir) == load_manifest(corpus_dir)
    assert {file: file.stat().st_mtime_ns for file in corpus_dir.iterdir()} == before
    with pytest.raises(UserError, match=r"data\.sources\.path: .* holds another corpus"):
        prepare([text_file], tokenizer_dir, SEQ_LEN + 1, corpus_dir)
    with pytest.raises(UserError, match="holds another corpus"):
        prepare([text_file], make_tokenizer("no bos"), SEQ_LEN, corpus_dir)
    text_file.write_text(text_file.read_text() + "\n\nw5")
    with pytest.raises(UserError, match="holds another corpus"):
        prepare([text_file], tokenizer_dir, SEQ_LEN, corpus_dir)


def test_ensure_prepared_makes_the_corpus_once_and_then_finds_it(
    text_file: Path, tokenizer_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "data" / "corpus"
    with pytest.raises(
        UserError, match=r"(?s)data\.sources\.path: no prepared corpus at .*data prepare --input"
    ):
        ensure_prepared(path, "", tokenizer_dir, SEQ_LEN)
    assert not path.parent.exists()
    made = ensure_prepared(path, str(text_file), tokenizer_dir, SEQ_LEN)
    monkeypatch.setattr(prepare_module, "_fill", None)  # calling it would fail
    assert ensure_prepared(path, str(text_file), tokenizer_dir, SEQ_LEN) == made
    text_file.unlink()
    assert ensure_prepared(path, str(text_file), tokenizer_dir, SEQ_LEN) == made
    assert ensure_prepared(path, "", tokenizer_dir, SEQ_LEN) == made


@pytest.mark.parametrize(
    ("kind", "what", "source"),
    [
        ("file", "it is a file", "there"),
        ("dataset", "it is a folder of Hugging Face datasets", "there"),
        ("dataset dict", "it is a folder of Hugging Face datasets", "there/validation"),
        ("folder", "the folder holds something else", None),
    ],
)
def test_what_is_no_corpus_is_refused_with_the_command_that_makes_one(
    tokenizer_dir: Path, tmp_path: Path, kind: str, what: str, source: str | None
) -> None:
    path, output = tmp_path / "there", str(tmp_path / "there-prepared") if source else "FOLDER"
    if kind == "file":
        path.write_text("w2 w3")
    else:
        path.mkdir()
        name = {"dataset": "state.json", "dataset dict": "dataset_dict.json"}.get(kind, "notes.txt")
        (path / name).write_text('{"splits": ["validation"]}')
    taken = str(tmp_path / source) if source else "FILE"
    for prepare_from in ("", str(tmp_path / "input.txt")):
        with pytest.raises(UserError) as caught:
            ensure_prepared(path, prepare_from, tokenizer_dir, SEQ_LEN)
        assert str(caught.value) == (
            f"data.sources.path: no prepared corpus at {path}: {what}; run `torchtitan-diloco data prepare --input {taken} "
            f"--tokenizer {tokenizer_dir} --seq-len 16 --output {output}`, and give {output}"
        )
    with pytest.raises(
        UserError, match=f"{what}; run .* --tokenizer TOKENIZER --seq-len N --output {output}"
    ):
        load_manifest(path)


def test_a_corpus_without_its_manifest_is_told_from_a_folder_of_datasets(
    corpus_dir: Path, tokenizer_dir: Path
) -> None:
    (corpus_dir / "manifest.json").unlink()
    with pytest.raises(UserError) as caught:
        ensure_prepared(corpus_dir, "", tokenizer_dir, SEQ_LEN)
    assert str(caught.value) == (
        f"data.sources.path: no prepared corpus at {corpus_dir}: the folder holds a corpus without its manifest.json; copy "
        f"that back (`torchtitan-diloco data verify {corpus_dir}` checks the rest), or remove the folder and run "
        f"`torchtitan-diloco data prepare --input FILE --tokenizer {tokenizer_dir} --seq-len 16 --output {corpus_dir}`"
    )
    with pytest.raises(UserError, match=r"a corpus without its manifest\.json; copy that back"):
        load_manifest(corpus_dir)


def places(value: Any) -> Iterator[tuple[str | int, ...]]:
    """Every place in a JSON value, its root included."""
    yield ()
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield from ((key, *rest) for rest in places(inner))


def test_a_value_of_the_wrong_type_anywhere_in_a_manifest_is_named_with_its_field(corpus_dir: Path) -> None:
    file = corpus_dir / "manifest.json"
    whole = json.loads(file.read_text())
    cases = [(place, value) for place in places(whole) for value in (None, [], {}, "x", -1)]
    assert len(cases) > 100
    # Text that the digest does not cover may be any text; of the files, `verify` finds what is wrong.
    free = [("text_key",), ("tokenizer", "path"), ("sources", 0, "name"), ("sources", 0, "sha256")]
    for i, record in enumerate(whole["files"]):
        free += [
            ("files", i, key)
            for key in record
            if key == "sha256" or (key == "name" and not record[key].endswith(".arrow"))
        ]
    harmless = [*((place, "x") for place in free), (("tokenizer", "bos_id"), None), (("sources",), [])]
    for place, value in cases:
        changed = copy.deepcopy({"root": whole})
        inner: Any = changed
        *path, last = ("root", *place)
        for key in path:
            inner = inner[key]
        inner[last] = value
        file.write_text(json.dumps(changed["root"]))
        if (place, value) in harmless:
            load_manifest(corpus_dir)
            continue
        with pytest.raises(UserError) as caught:
            load_manifest(corpus_dir)
        said = str(caught.value)
        assert said.startswith(f"data.sources.path: {file} is damaged (") and "prepare it again" in said, said
        assert "\n" not in said
        field = next((key for key in reversed(place) if isinstance(key, str)), "it")
        assert field in said or "its digest does not fit" in said, (place, value, said)
        for internal in ("NoneType", "argument", "indices", "mapping", "attribute", "object is not", "'"):
            assert internal not in said, said


def test_ensure_prepared_refuses_a_corpus_that_does_not_fit(
    corpus_dir: Path, text_file: Path, tokenizer_dir: Path, make_tokenizer: Callable[..., Path]
) -> None:
    with pytest.raises(UserError, match=r"training\.seq_len: is 32, but the corpus .* was prepared for 16"):
        ensure_prepared(corpus_dir, "", tokenizer_dir, 32)
    with pytest.raises(UserError, match=r"model\.hf_assets_path: the tokenizer .* is not the one"):
        ensure_prepared(corpus_dir, "", make_tokenizer("one token for both"), SEQ_LEN)
    with pytest.raises(
        UserError, match=r"data\.sources\.prepare_from: the corpus .* was made from input\.txt"
    ):
        ensure_prepared(corpus_dir, "bundled:kjv", tokenizer_dir, SEQ_LEN)
    text_file.write_text("w2 w3")
    with pytest.raises(UserError, match=r"not from .*input\.txt as it is now"):
        ensure_prepared(corpus_dir, str(text_file), tokenizer_dir, SEQ_LEN)


def test_a_corpus_prepared_from_a_datasets_folder_is_found_again(tokenizer_dir: Path, tmp_path: Path) -> None:
    from datasets import Dataset

    source, path = tmp_path / "hf", tmp_path / "corpus"
    Dataset.from_dict({"text": numbered_documents(50)}).save_to_disk(source, num_shards=2)
    made = ensure_prepared(path, str(source), tokenizer_dir, SEQ_LEN)
    assert ensure_prepared(path, str(source), tokenizer_dir, SEQ_LEN) == made
    shutil.rmtree(tmp_path / "hf")
    assert ensure_prepared(path, str(source), tokenizer_dir, SEQ_LEN) == made
    with pytest.raises(UserError, match=r"hf/data-.*, not from .*other as it is now"):
        ensure_prepared(path, str(tmp_path / "other"), tokenizer_dir, SEQ_LEN)
    Dataset.from_dict({"text": numbered_documents(49)}).save_to_disk(source, num_shards=2)
    with pytest.raises(UserError, match=r"not from .*hf as it is now"):
        ensure_prepared(path, str(source), tokenizer_dir, SEQ_LEN)


def test_a_source_edited_at_its_size_is_another_and_is_hashed_once(
    text_file: Path, tokenizer_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = ensure_prepared(tmp_path / "corpus", str(text_file), tokenizer_dir, SEQ_LEN)
    assert ensure_prepared(tmp_path / "corpus", str(text_file), tokenizer_dir, SEQ_LEN) == made
    with monkeypatch.context() as patch:
        patch.setattr(fits, "sha256_file", None)  # calling it would fail
        assert ensure_prepared(tmp_path / "corpus", str(text_file), tokenizer_dir, SEQ_LEN) == made
    text_file.write_text(text_file.read_text().replace("w5", "w6", 1))
    os.utime(text_file, ns=(1, 1))
    with pytest.raises(UserError, match=r"not from .*input\.txt as it is now"):
        ensure_prepared(tmp_path / "corpus", str(text_file), tokenizer_dir, SEQ_LEN)


@pytest.mark.parametrize(
    ("inputs", "tokenizer", "seq_len", "message"),
    [
        (
            ["absent.txt"],
            "plain",
            16,
            r"data\.sources\.prepare_from: cannot read .*absent\.txt: No such file",
        ),
        (["."], "plain", 16, r"data\.sources\.prepare_from: .* is not a file"),
        ([], "plain", 16, r"data\.sources\.prepare_from: no input file"),
        (["bundled:iliad"], "plain", 16, r"bundled:iliad.*there are bundled:bpe2048, bundled:kjv"),
        (
            ["empty.txt"],
            "plain",
            16,
            r"data\.sources\.prepare_from: 0 documents .* fewer than one sequence of 16",
        ),
        (["blank.txt"], "plain", 16, r"data\.sources\.prepare_from: 0 documents"),
        (
            ["small.txt"],
            "plain",
            16,
            r"1 documents with 3 tokens to predict in small\.txt, fewer than one sequence of 16",
        ),
        (["broken.txt"], "plain", 16, r"data\.sources\.prepare_from: .*broken\.txt:1: not UTF-8"),
        (["small.txt"], "absent", 16, r"model\.hf_assets_path: no tokenizer\.json in"),
        (["small.txt"], "damaged", 16, r"model\.hf_assets_path: the tokenizer in .* cannot be loaded"),
        (["small.txt"], "damaged config", 16, r"model\.hf_assets_path: .*tokenizer_config\.json is not JSON"),
        (["small.txt"], "no eos", 16, r"model\.hf_assets_path: .* has no end-of-text token"),
        (["small.txt"], "plain", 0, r"training\.seq_len: must be at least 1"),
        (["small.txt"], "plain", 10**20, r"training\.seq_len: must be .* at most 2147483646"),
        (["small.txt"], "plain", 2**31 - 2, r"fewer than one sequence of 2147483646"),
    ],
)
def test_bad_input_is_named_and_leaves_nothing_behind(
    inputs: list[str],
    tokenizer: str,
    seq_len: int,
    message: str,
    make_tokenizer: Callable[..., Path],
    tmp_path: Path,
) -> None:
    for name, content in {"empty": b"", "blank": b"\n \n", "small": b"w5 w6", "broken": b"\xff"}.items():
        (tmp_path / f"{name}.txt").write_bytes(content)
    folder = tmp_path / "absent" if tokenizer == "absent" else make_tokenizer(tokenizer)
    if tokenizer == "damaged":
        (folder / "tokenizer.json").write_text('{"version": ')
    if tokenizer == "damaged config":
        (folder / "tokenizer_config.json").write_text("{")
    output = tmp_path / "out" / "corpus"
    with pytest.raises(UserError, match=message) as caught:
        prepare([i if i.startswith("bundled:") else tmp_path / i for i in inputs], folder, seq_len, output)
    assert "\n" not in str(caught.value)
    assert not output.parent.exists() or os.listdir(output.parent) == []


def test_a_target_that_is_no_corpus_is_left_alone(
    text_file: Path, tokenizer_dir: Path, tmp_path: Path
) -> None:
    for name in ("folder", "empty"):
        (tmp_path / name).mkdir()
    (tmp_path / "folder" / "precious").write_text("mine")
    foreign = r"data\.sources\.path: .* holds something else than a prepared corpus; give another folder$"
    with pytest.raises(UserError, match=foreign):
        prepare([text_file], tokenizer_dir, SEQ_LEN, tmp_path / "folder")
    assert_nothing_but(tmp_path / "folder", "precious")
    (tmp_path / "folder" / "manifest.json").write_text('{"name": "of a web page"}')
    with pytest.raises(UserError, match=foreign):
        prepare([text_file], tokenizer_dir, SEQ_LEN, tmp_path / "folder")
    with pytest.raises(UserError, match=r"precious is a file; give another folder$"):
        prepare([text_file], tokenizer_dir, SEQ_LEN, tmp_path / "folder" / "precious")
    with pytest.raises(UserError, match=r"data\.sources\.path: cannot write .*File exists"):
        prepare([text_file], tokenizer_dir, SEQ_LEN, text_file / "corpus")
    prepare([text_file], tokenizer_dir, SEQ_LEN, tmp_path / "empty")
    assert verify(tmp_path / "empty").counts.documents == 300


def test_an_output_that_is_or_holds_an_input_is_refused_by_that_and_left_alone(
    corpus_dir: Path, text_file: Path, tokenizer_dir: Path, tmp_path: Path
) -> None:
    link = tmp_path / "link"
    link.symlink_to(text_file)
    for given, output in ((text_file, text_file), (text_file, link), (link, text_file)):
        with pytest.raises(UserError, match=f"{output} is the input itself; give another folder$"):
            prepare([given], tokenizer_dir, SEQ_LEN, output)
    own = corpus_dir / "data-00000.arrow"
    for given, output in ((text_file, text_file.parent), (own, corpus_dir)):
        with pytest.raises(UserError, match=f"the input {given} lies inside {output}; give another folder$"):
            prepare([given], tokenizer_dir, SEQ_LEN, output)
    assert text_file.is_file() and own.is_file()


@contextmanager
def small_files_only() -> Iterator[None]:
    """The kernel refuses files over 4 KB to this process, as a full disk does (EFBIG instead of ENOSPC).

    Only around the code under test: pytest's own output may be a file too.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_write_that_fails_leaves_nothing_behind(
    text_file: Path, tokenizer_dir: Path, tmp_path: Path
) -> None:
    refusal = pytest.raises(UserError, match=r"data\.sources\.path: no room to write .*free some space")
    with refusal, small_files_only():
        prepare([text_file], tokenizer_dir, SEQ_LEN, tmp_path / "out" / "corpus")
    assert_nothing_but(tmp_path / "out")


def test_a_disk_that_fills_up_at_the_flush_leaves_nothing_behind(
    text_file: Path, tokenizer_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(UserError, match=r"no room to write .*No space left on device"):
            prepare([text_file], tokenizer_dir, SEQ_LEN, tmp_path / "out" / "corpus")
    assert_nothing_but(tmp_path / "out")
    prepare([text_file], tokenizer_dir, SEQ_LEN, tmp_path / "out" / "corpus")
    assert_nothing_but(tmp_path / "out", "corpus")


CHILD = """
import logging, os, sys, time
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from torchtitan_diloco.data import prepare, writer
logging.basicConfig(level=logging.INFO)
writer.BLOCK_BYTES = 1024
text, tokenizer, output, signals = sys.argv[1:]
def pause(progress):
    print("working", progress.sequences, flush=True)
    while not os.path.exists(signals):
        time.sleep(0.02)
print(prepare.prepare([text], tokenizer, 16, output, progress=pause).digest, flush=True)
"""


def start_child(text_file: Path, tokenizer_dir: Path, output: Path, go: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", CHILD, str(text_file), str(tokenizer_dir), str(output), str(go)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_a_killed_preparation_leaves_no_corpus_and_is_made_good(
    text_file: Path, tokenizer_dir: Path, tmp_path: Path
) -> None:
    output = tmp_path / "out" / "corpus"
    child = start_child(text_file, tokenizer_dir, output, tmp_path / "never")
    assert child.stdout.readline().startswith("working ")
    child.send_signal(signal.SIGKILL)
    child.communicate()
    (leftover,) = [name for name in os.listdir(output.parent) if ".preparing-" in name]
    assert os.path.getsize(output.parent / leftover / "data-00000.arrow") > 0  # it had begun to write
    with pytest.raises(UserError, match="no prepared corpus"):
        ensure_prepared(output, "", tokenizer_dir, SEQ_LEN)
    ensure_prepared(output, str(text_file), tokenizer_dir, SEQ_LEN)
    assert_nothing_but(output.parent, "corpus")
    verify(output)


def test_a_second_process_waits_for_the_first_and_uses_its_corpus(
    text_file: Path, tokenizer_dir: Path, tmp_path: Path
) -> None:
    output, go = tmp_path / "out" / "corpus", tmp_path / "go"
    first = start_child(text_file, tokenizer_dir, output, go)
    assert first.stdout.readline().startswith("working ")
    second = start_child(text_file, tokenizer_dir, output, go)
    while "waiting for another process" not in (line := second.stderr.readline()):
        assert line, "the second process ended without waiting"
    time.sleep(0.05)
    assert not output.exists()
    go.touch()
    out_first, err_first = first.communicate()
    out_second, err_second = second.communicate()
    assert (first.returncode, second.returncode) == (0, 0), err_first + err_second
    assert out_second == out_first.splitlines()[-1] + "\n"  # the same digest, and no work of its own
    assert_nothing_but(output.parent, "corpus")


def test_without_file_locks_the_faster_process_wins(
    text_file: Path,
    tokenizer_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Some network file systems refuse locks; the rename stays atomic."""

    def refuse(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr("fcntl.flock", refuse)
    made = prepare([text_file], tokenizer_dir, SEQ_LEN, tmp_path / "other" / "corpus")
    assert "has no locks" in caplog.text
    output = tmp_path / "out" / "corpus"

    def overtake(_: object) -> None:
        shutil.copytree(tmp_path / "other" / "corpus", output)

    assert prepare([text_file], tokenizer_dir, SEQ_LEN, output, progress=overtake) == made
    assert_nothing_but(output.parent, "corpus")


def test_verify_finds_every_kind_of_damage(corpus_dir: Path) -> None:
    data = corpus_dir / "data-00000.arrow"
    whole = data.read_bytes()
    data.write_bytes(whole[:-200] + bytes([whole[-200] ^ 1]) + whole[-199:])
    with pytest.raises(UserError, match=r"data-00000\.arrow has changed(?s:.*)prepare it again"):
        verify(corpus_dir)
    data.write_bytes(whole[:-1])
    with pytest.raises(UserError, match=f"has {len(whole) - 1} bytes instead of {len(whole)}"):
        verify(corpus_dir)
    data.unlink()
    with pytest.raises(UserError, match="cannot be read: No such file"):
        verify(corpus_dir)
    with pytest.raises(UserError, match=r"data\.sources\.path: .* is damaged"):
        Corpus(corpus_dir)
    data.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(UserError, match=r"data\.sources\.path: .* is damaged"):
        Corpus(corpus_dir)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda text: text[:50], "is damaged"),
        (lambda text: text.replace('"seq_len": 16', '"seq_len": 17'), "its digest does not fit"),
        (lambda text: text.replace('"seq_len": 16,', ""), "is damaged"),
        (lambda text: "[]", "is damaged"),
        (lambda text: text.replace('"format_version": 1', '"format_version": 9'), "has format version 9"),
    ],
)
def test_a_changed_manifest_is_refused(corpus_dir: Path, change: Callable[[str], str], message: str) -> None:
    file = corpus_dir / "manifest.json"
    file.write_text(change(file.read_text()))
    with pytest.raises(UserError, match=f"data.sources.path: .*{message}"):
        load_manifest(corpus_dir)


def test_preparing_module_imports_no_torch() -> None:
    code = (
        "import sys, torchtitan_diloco.data.prepare, torchtitan_diloco.data.corpus, torchtitan_diloco.cli.data; "
        "print('torch' in sys.modules, 'datasets' in sys.modules)"
    )
    out = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    assert out == "False False\n"
