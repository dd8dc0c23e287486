"""Prepares a corpus: documents -> tokens -> packed rows -> a folder that appears complete or not at all.

The result depends on the documents, the tokenizer and seq_len only, so every island can prepare its own copy:
equal input gives an equal ``Manifest.digest`` on any machine.
"""

import errno
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from torchtitan_diloco import assets
from torchtitan_diloco.data.absent import holds_corpus_files, remedy
from torchtitan_diloco.data.atomic import appearing_folder, exclusive
from torchtitan_diloco.data.chunks import CHUNK_BYTES, cut, workers_for
from torchtitan_diloco.data.fits import Settings, check_fits, check_same_source
from torchtitan_diloco.data.manifest import (
    FILE_NAME,
    FORMAT_VERSION,
    Counts,
    FileRecord,
    Manifest,
    TokenizerRecord,
    is_manifest,
    load_manifest,
    sha256_file,
    verify,
    verify_sizes,
)
from torchtitan_diloco.data.packing import Packer, Tokens
from torchtitan_diloco.data.parts import Parts, Recipe, identity
from torchtitan_diloco.data.sources import Sources
from torchtitan_diloco.data.tokenizer import CorpusTokenizer, tokenizer_sha256
from torchtitan_diloco.data.writer import MAX_SEQ_LEN, CorpusWriter, rows_per_block
from torchtitan_diloco.errors import UserError

logger = logging.getLogger(__name__)

__all__ = ["Manifest", "Progress", "Settings", "ensure_prepared", "load_manifest", "prepare", "verify"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """How far a preparation is; bytes are of the source files as stored."""

    bytes_read: int
    bytes_total: int
    documents: int
    sequences: int


@dataclass(frozen=True, kw_only=True, slots=True)
class _Job:
    """A checked request: what decides the contents of the folder."""

    sources: Sources
    tokenizer_dir: str
    tokenizer_sha256: str
    seq_len: int
    settings: Settings
    progress: Callable[[Progress], None] | None = field(default=None)
    jobs: int | None = None


def prepare(
    inputs: Sequence[str | Path],
    tokenizer_dir: str | Path,
    seq_len: int,
    output: str | Path,
    *,
    text_key: str = "text",
    progress: Callable[[Progress], None] | None = None,
    settings: Settings | None = None,
    jobs: int | None = None,
) -> Manifest:
    """Tokenises and packs `inputs` into the folder `output`, in memory that does not grow with the number of documents.

    Args:
        inputs: text, JSONL, Parquet files (see DocumentReader), Hugging Face ``datasets`` folders, or ``bundled:NAME``;
            documents in this order.
        tokenizer_dir: folder of a Hugging Face tokenizer, or ``bundled:NAME``. seq_len: inputs per sequence;
        rows hold one token more (see packing). output: folder to make. If it is there and was made from the
        same files with the same tokenizer, seq_len and text
            key, nothing is done. If another process is making it, that one is waited for.
        progress: called now and then.
        settings: names of the arguments in messages.
        jobs: processes that tokenise; None = as many as there are cores. What they have done survives a kill, and is
            taken up again by the next call with the same arguments.

    Raises:
        UserError: an input, the tokenizer or the output cannot be used, the disk is full, or `output` holds
        something else.
            Nothing half-written is left behind.
    """
    settings = settings or Settings()
    if jobs is not None and jobs < 1:
        raise UserError(f"--jobs: must be at least 1, not {jobs}; leave it out for one per core")
    if not 1 <= seq_len <= MAX_SEQ_LEN:
        raise UserError(f"{settings.seq_len}: must be at least 1 and at most {MAX_SEQ_LEN}, not {seq_len}")
    target = Path(output)
    _require_apart(inputs, target, settings)
    job = _Job(
        sources=Sources.find(inputs, text_key, settings.input),
        tokenizer_dir=str(tokenizer_dir),
        tokenizer_sha256=tokenizer_sha256(assets.resolve(tokenizer_dir), setting=settings.tokenizer),
        seq_len=seq_len,
        settings=settings,
        progress=progress,
        jobs=jobs,
    )
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with exclusive(target) as locked:
            if not _is_free(target):
                return _existing(target, job)
            try:
                with appearing_folder(target, clean=locked) as folder:
                    manifest = _fill(folder, job, target.parent / f".{target.name}.parts")
            except OSError as error:
                if locked or error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                    raise
                return _existing(target, job)  # without locks, another process was faster
            return manifest
    except OSError as error:
        raise UserError(_output_problem(error, target, settings.output)) from error


def ensure_prepared(
    path: str | Path,
    prepare_from: str,
    tokenizer_dir: str | Path,
    seq_len: int,
    *,
    text_key: str = "text",
    progress: Callable[[Progress], None] | None = None,
) -> Manifest:
    """The manifest of the corpus at `path`, which is prepared first from `prepare_from` if it is not there.

    Safe to call in any number of processes at once. The tokenizer must be the one the corpus was made with.

    Raises UserError as `prepare` does, and when the corpus is absent and `prepare_from` empty, or does not
    fit the arguments.
    """
    settings = Settings()
    if _is_free(Path(path)):
        if prepare_from:
            return prepare([prepare_from], tokenizer_dir, seq_len, path, text_key=text_key, progress=progress)
        raise UserError(
            f"{settings.output}: no prepared corpus at {path}; set data.sources.prepare_from, or run\n"
            f"  torchtitan-diloco data prepare --input FILE --tokenizer {tokenizer_dir} --seq-len {seq_len} "
            f"--output {path}"
        )
    if not (Path(path) / FILE_NAME).exists():
        raise UserError(
            f"{settings.output}: no prepared corpus at {path}: {remedy(path, tokenizer=tokenizer_dir, seq_len=seq_len)}"
        )
    manifest = load_manifest(path)
    check_fits(manifest, path, tokenizer_dir, seq_len)
    if prepare_from:
        check_same_source(manifest, path, prepare_from)
    return manifest


def _require_apart(inputs: Sequence[str | Path], target: Path, settings: Settings) -> None:
    """Raises UserError where the output is an input or holds one: whatever else is said of it, it must not be removed."""
    output = target.resolve()
    for given in inputs:
        path = assets.resolve(given).resolve()
        if path == output:
            raise UserError(f"{settings.output}: {target} is the input itself; give another folder")
        if output in path.parents:
            raise UserError(f"{settings.output}: the input {given} lies inside {target}; give another folder")


def _is_free(target: Path) -> bool:
    """Whether a folder can be put at `target`: nothing is there, or an empty folder."""
    return not target.exists() or (target.is_dir() and not any(target.iterdir()))


def _existing(target: Path, job: _Job) -> Manifest:
    if not holds_corpus_files(target) and not is_manifest(target / FILE_NAME):
        what = "holds something else than a prepared corpus" if target.is_dir() else "is a file"
        raise UserError(f"{job.settings.output}: {target} {what}; give another folder")
    found = verify_sizes(target, setting=job.settings.output)
    if (found.sources, found.seq_len, found.text_key, found.tokenizer.sha256) != (
        job.sources.records,
        job.seq_len,
        job.sources.text_key,
        job.tokenizer_sha256,
    ):
        raise UserError(
            f"{job.settings.output}: {target} holds another corpus (other input, tokenizer or sequence length); "
            "remove it or give another folder"
        )
    return found


def _output_problem(error: OSError, target: Path, setting: str) -> str:
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return f"{setting}: no room to write {target} ({error.strerror}); free some space or give a folder elsewhere"
    return f"{setting}: cannot write {target}: {error.strerror or error} ({error.filename})"


def _documents(
    job: _Job, tokenizer: CorpusTokenizer, parts_folder: Path
) -> Iterator[tuple[int, list[Tokens]]]:
    """(bytes of input done, some documents), in order. Small input needs no processes and leaves nothing to take up."""
    chunks = cut(job.sources)
    if len(chunks) == 1 or job.sources.size <= CHUNK_BYTES:
        for done, batch in job.sources.batches():
            yield done, tokenizer.encode(batch)
        return
    recipe = Recipe(
        tokenizer=tokenizer.to_json(),
        prefix=tokenizer.prefix,
        suffix=tokenizer.suffix,
        dtype=str(tokenizer.dtype),
        text_key=job.sources.text_key,
        setting=job.settings.input,
    )
    key = identity(recipe, chunks, [record.sha256 for record in job.sources.records])
    parts = Parts(parts_folder, recipe, chunks, key)
    if parts.found:
        logger.info("%d of %d parts were tokenised before and are used again", parts.found, len(chunks))
    try:
        yield from parts.documents(workers_for(chunks, job.jobs))
    except (OSError, UserError):
        parts.remove()  # only what was interrupted is kept
        raise
    parts.remove()


def _fill(folder: Path, job: _Job, parts_folder: Path) -> Manifest:
    """Writes everything into the empty `folder`."""
    tokenizer = CorpusTokenizer(assets.resolve(job.tokenizer_dir), setting=job.settings.tokenizer)
    packer = Packer(job.seq_len, rows_per_block(job.seq_len, tokenizer.dtype), tokenizer.dtype)

    with CorpusWriter(folder, job.seq_len, tokenizer.dtype) as writer:
        for done, documents in _documents(job, tokenizer, parts_folder):
            for block in packer.add(documents):
                writer.add(block)
            if job.progress is not None:
                counts = {"documents": packer.documents, "sequences": packer.sequences}
                job.progress(Progress(bytes_read=done, bytes_total=job.sources.size, **counts))
        for block in packer.finish():
            writer.add(block)
    if packer.sequences == 0:
        raise UserError(
            f"{job.settings.input}: {packer.documents} documents with {packer.pending} tokens to predict in "
            f"{', '.join(record.name for record in job.sources.records)}, fewer than one sequence of {job.seq_len}"
        )
    names = writer.close()
    manifest = Manifest(
        format_version=FORMAT_VERSION,
        seq_len=job.seq_len,
        dtype=str(tokenizer.dtype),
        tokenizer=TokenizerRecord(
            sha256=job.tokenizer_sha256,
            path=job.tokenizer_dir,
            vocab_size=tokenizer.vocab_size,
            bos_id=tokenizer.bos_id,
            eos_id=tokenizer.eos_id,
        ),
        counts=Counts(
            documents=packer.documents,
            sequences=packer.sequences,
            tokens=packer.sequences * job.seq_len,
            dropped_tokens=packer.pending,
        ),
        content_sha256=writer.content_sha256,
        text_key=job.sources.text_key,
        files=tuple(
            FileRecord(name=name, bytes=(folder / name).stat().st_size, sha256=sha256_file(folder / name))
            for name in names
        ),
        sources=job.sources.records,
    )
    (folder / FILE_NAME).write_text(manifest.to_json(), encoding="utf-8")
    return manifest
