"""Whether a prepared corpus is the one that was asked for: sequence length, tokenizer, and the files it was made from."""

from dataclasses import dataclass
from pathlib import Path

from torchtitan_diloco import assets
from torchtitan_diloco.data.manifest import Manifest, sha256_file
from torchtitan_diloco.data.sources import named_files, source_name
from torchtitan_diloco.data.stamp import once
from torchtitan_diloco.data.tokenizer import tokenizer_sha256
from torchtitan_diloco.errors import UserError


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """By which names the user gave the arguments, for messages."""

    input: str = "data.sources.prepare_from"
    output: str = "data.sources.path"
    tokenizer: str = "model.hf_assets_path"
    seq_len: str = "training.seq_len"


def check_fits(manifest: Manifest, path: str | Path, tokenizer_dir: str | Path, seq_len: int) -> None:
    """Raises UserError unless the corpus was made for this sequence length and tokenizer."""
    settings = Settings()
    if manifest.seq_len != seq_len:
        raise UserError(
            f"{settings.seq_len}: is {seq_len}, but the corpus {path} was prepared for {manifest.seq_len}; "
            "set it to that or prepare the corpus again elsewhere"
        )
    if manifest.tokenizer.sha256 != tokenizer_sha256(assets.resolve(tokenizer_dir)):
        raise UserError(
            f"{settings.tokenizer}: the tokenizer {tokenizer_dir} is not the one that the corpus {path} was prepared "
            f"with ({manifest.tokenizer.path}); use that one or prepare the corpus again elsewhere"
        )


def check_same_source(manifest: Manifest, path: str | Path, prepare_from: str) -> None:
    """Raises UserError unless the corpus was made from what is at ``prepare_from`` now. A source that has gone is fine.

    A source is hashed once, and again when its size or time has changed (see ``stamp``): at every start would take too long.
    """
    if not _is_same_source(manifest, prepare_from):
        made_from = ", ".join(f"{record.name} ({record.bytes} bytes)" for record in manifest.sources)
        raise UserError(
            f"{Settings().input}: the corpus {path} was made from {made_from}, not from {prepare_from} as it is now; "
            "remove the corpus or give another path"
        )


def _is_same_source(manifest: Manifest, prepare_from: str) -> bool:
    place = assets.resolve(prepare_from)
    if not place.exists():
        name = source_name(prepare_from)  # of a folder the corpus has the files in it
        return all(record.name == name or record.name.startswith(f"{name}/") for record in manifest.sources)
    given = list(named_files([prepare_from], Settings().input))
    sizes = [(name, file.stat().st_size if file.exists() else -1) for name, file in given]
    if sizes != [(record.name, record.bytes) for record in manifest.sources]:
        return False
    files = [file for _, file in given]
    try:
        # The name is no file's, so that this memory is not taken for that of a corpus at the same place.
        found = once(place / "as a source", files, lambda: {"sha256": [sha256_file(file) for file in files]})
    except PermissionError:
        return True  # whoever has the corpus need not be able to read the source
    return bool(found["sha256"] == [record.sha256 for record in manifest.sources])
