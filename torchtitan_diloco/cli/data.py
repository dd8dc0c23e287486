"""``torchtitan-diloco data``: prepare, verify and inspect corpora, and audit what a run did with them."""

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from torchtitan_diloco.cli.stop import interruptible
from torchtitan_diloco.data.corpus import Corpus
from torchtitan_diloco.data.megatron import check_megatron, is_megatron, read_index, scan_tokens
from torchtitan_diloco.data.prepare import Manifest, Progress, Settings, load_manifest, prepare, verify
from torchtitan_diloco.data.run_audit import audit_run, describe

_FLAGS = Settings(input="--input", output="--output", tokenizer="--tokenizer", seq_len="--seq-len")


@dataclass(kw_only=True, slots=True)
class Prepare:
    """Tokenise and pack text into a corpus folder.

    Text files hold documents separated by blank lines, JSONL files one document a line, tables one a row.
    """

    input: tuple[str, ...]
    """Text, JSONL (.gz allowed) or Parquet files, folders of Hugging Face datasets, in this order; or bundled:kjv."""
    tokenizer: str
    """Folder of a Hugging Face tokenizer; or bundled:bpe2048."""
    seq_len: int
    """Tokens a sequence (training.seq_len)."""
    output: Path
    """Folder to make."""
    text_key: str = "text"
    """Key of the text in JSONL files, column of it in tables."""
    jobs: int | None = None
    """Processes that tokenise; by default one per core. After a kill, input above 16 MiB goes on where it was."""

    def run(self) -> None:
        """Prepares and shows a summary."""
        with _progress_bar() as progress:
            manifest = prepare(
                self.input,
                self.tokenizer,
                self.seq_len,
                self.output,
                text_key=self.text_key,
                progress=progress,
                settings=_FLAGS,
                jobs=self.jobs,
            )
        print(_summary(self.output, manifest))


@dataclass(slots=True)
class Verify:
    """Read every byte of a corpus and compare it with its manifest."""

    path: tyro.conf.Positional[Path]
    """Corpus folder, or the .bin of a Megatron corpus."""

    def run(self) -> None:
        """Raises UserError when something is missing or changed."""
        if is_megatron(self.path):
            index = check_megatron(self.path, setting="DIR")
            _, largest = scan_tokens(self.path.with_suffix(".bin"), index, setting="DIR")
            print(
                f"{self.path}: {len(index.lengths)} sequences, {index.tokens} tokens, index and tokens agree; "
                f"largest id {largest}"
            )
            return
        manifest = verify(self.path, setting="DIR")
        Corpus(self.path, setting="DIR")  # that the files listed are all: it counts their sequences
        size = sum(record.bytes for record in manifest.files)
        print(
            f"{self.path}: {len(manifest.files)} files, {size} bytes, all as in the manifest; digest {manifest.digest}"
        )


@dataclass(slots=True)
class Inspect:
    """Show what a corpus holds."""

    path: tyro.conf.Positional[Path]
    """Corpus folder, or the .bin of a Megatron corpus."""

    def run(self) -> None:
        """Reads the manifest, or the head of a Megatron index, only."""
        if is_megatron(self.path):
            index = read_index(self.path.with_suffix(".idx"), setting="DIR")
            print(
                f"{self.path}: Megatron corpus, {len(index.documents) - 1} documents in {len(index.lengths)} sequences, "
                f"{index.tokens} tokens ({index.dtype.name})"
            )
            return
        print(_summary(self.path, load_manifest(self.path, setting="DIR")))


@dataclass(slots=True)
class Audit:
    """Show what became of every sample of a run: consumed once, lost, repeated, deferred; per source and epoch.

    Exits with 1 when a sample was consumed twice, or the ledgers contradict themselves.
    """

    runs: tyro.conf.Positional[tuple[Path, ...]]
    """Folder of the run; several, when its islands lie on several file systems."""
    json: bool = False
    """Print everything as JSON."""

    def run(self) -> int:
        """The exit code."""
        report = audit_run(self.runs)
        print(json.dumps(report.to_json(), indent=1) if self.json else describe(report))
        return 0 if report.ok else 1


Command = (
    Annotated[Prepare, tyro.conf.subcommand("prepare")]
    | Annotated[Verify, tyro.conf.subcommand("verify")]
    | Annotated[Inspect, tyro.conf.subcommand("inspect")]
    | Annotated[Audit, tyro.conf.subcommand("audit")]
)


def main(argv: list[str]) -> int:
    """Runs ``data`` with the arguments after it; returns the exit code. Raises UserError."""
    command = tyro.cli(Command, prog="torchtitan-diloco data", description=__doc__, args=argv)
    with interruptible():
        return command.run() or 0


def _summary(path: Path, manifest: Manifest) -> str:
    counts, tokenizer = manifest.counts, manifest.tokenizer
    rows = {
        "corpus": str(path),
        "digest": manifest.digest,
        "sequences": f"{counts.sequences} of {manifest.seq_len} tokens ({manifest.dtype})",
        "tokens": f"{counts.tokens} ({counts.dropped_tokens} more filled no whole sequence)",
        "documents": str(counts.documents),
        "tokenizer": f"{tokenizer.path} ({tokenizer.vocab_size} entries, sha256 {tokenizer.sha256[:12]})",
        "sources": ", ".join(f"{record.name} ({record.bytes} bytes)" for record in manifest.sources),
        "size": f"{sum(record.bytes for record in manifest.files)} bytes in {len(manifest.files)} files",
    }
    return "\n".join(f"{key:<10} {value}" for key, value in rows.items())


@contextmanager
def _progress_bar() -> Iterator[Callable[[Progress], None] | None]:
    """A bar on a terminal, nothing elsewhere."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    counts = TextColumn("{task.fields[documents]} documents, {task.fields[sequences]} sequences")
    columns = (TextColumn("preparing"), BarColumn(), DownloadColumn(), counts, TimeRemainingColumn())
    with Bar(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("", total=None, documents=0, sequences=0)

        def update(state: Progress) -> None:
            bar.update(
                task,
                completed=state.bytes_read,
                total=state.bytes_total,
                documents=state.documents,
                sequences=state.sequences,
            )

        yield update
