"""Checks a corpus byte by byte on its first use, and remembers that it did, for as long as sizes and times stay.

The memory is a small file per corpus in ``$XDG_CACHE_HOME/torchtitan_diloco`` (``~/.cache`` by default), not beside the
corpus: a copy made with its times kept is checked again where it arrives.
"""

import hashlib
import json
import logging
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torchtitan_diloco.data.atomic import exclusive
from torchtitan_diloco.data.manifest import FILE_NAME, Manifest, load_manifest, sha256_file, verify
from torchtitan_diloco.data.megatron import check_megatron, scan_tokens
from torchtitan_diloco.errors import UserError

logger = logging.getLogger(__name__)
_FORMAT = 1


def cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "torchtitan_diloco"


def once(name: Path, files: Sequence[Path], check: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What ``check`` gives: from memory, if it was called before and the files' sizes and times have not changed.

    Of several processes that ask at once, one checks and the others wait. Where nothing can be remembered, the check is
    done every time, with a warning. Raises what ``check`` raises, and OSError when a file is missing.
    """
    key = [_FORMAT, [[str(file.resolve()), file.stat().st_size, file.stat().st_mtime_ns] for file in files]]
    where = hashlib.sha256(str(name.resolve()).encode()).hexdigest()[:32]
    memory = cache_folder() / f"checked-{where}.json"
    if (known := _recall(memory, key)) is not None:
        return known
    try:
        memory.parent.mkdir(parents=True, exist_ok=True)
        with exclusive(memory):
            if (known := _recall(memory, key)) is not None:
                return known
            value = check()
            temporary = memory.with_suffix(f".{os.getpid()}.tmp")
            temporary.write_text(json.dumps({"key": key, "value": value}))
            os.replace(temporary, memory)
            return value
    except OSError as error:
        if error.filename is None or not str(error.filename).startswith(str(memory.parent)):
            raise
        logger.warning("cannot remember that %s was checked (%s); it is checked at every start", name, error)
        return check()


def _recall(memory: Path, key: list[Any]) -> dict[str, Any] | None:
    try:
        known = json.loads(memory.read_text())
        return dict(known["value"]) if known["key"] == key else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def verify_once(path: str | Path, *, setting: str = "data.sources.path") -> Manifest:
    """The manifest of a prepared corpus whose every byte has been compared with it. Raises UserError as ``verify`` does."""
    manifest = load_manifest(path, setting=setting)
    folder = Path(path)
    files = [folder / FILE_NAME, *(folder / record.name for record in manifest.files)]
    if missing := [str(file) for file in files if not file.exists()]:
        raise UserError(f"{setting}: {path} is damaged: {', '.join(missing)} is missing; prepare it again")

    def check() -> dict[str, Any]:
        logger.info("first use of %s: reading all of it to compare it with its manifest", path)
        return {"digest": verify(path, setting=setting).digest}

    once(folder, files, check)
    return manifest


def identify_megatron(
    path: Path, tokenizer_sha256: str, seq_len: int, *, setting: str = "data.sources.path"
) -> tuple[str, int]:
    """(digest, largest id plus one) of a Megatron corpus, after reading all of it once.

    The digest is equal where index, tokens, tokenizer and sequence length are. Raises UserError when the files do not
    belong together.
    """
    idx, tokens = path.with_suffix(".idx"), path.with_suffix(".bin")
    index = check_megatron(path, setting=setting)

    def check() -> dict[str, Any]:
        logger.info("first use of %s: reading all of it", tokens)
        sha256, largest = scan_tokens(tokens, index, setting=setting)
        return {"idx": sha256_file(idx), "bin": sha256, "largest": largest}

    found = once(path.with_suffix(""), [idx, tokens], check)
    record = ["megatron", seq_len, found["idx"], found["bin"], tokenizer_sha256]
    return hashlib.sha256(json.dumps(record).encode()).hexdigest(), int(found["largest"]) + 1
