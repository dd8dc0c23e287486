"""Where the tokenizer of a configuration lies, shipped ones included, and its digest."""

import hashlib
from pathlib import Path

from torchtitan_diloco.assets import resolve
from torchtitan_diloco.errors import UserError

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "merges.txt")
"""What TorchTitan's tokenizer reads, in its order of preference; vocab and merges belong together."""


def tokenizer_folder(hf_assets_path: str) -> Path:
    """Folder that ``model.hf_assets_path`` means: "bundled:NAME" is a shipped one, anything else a path.

    Raises:
        UserError: there is no such folder, or no tokenizer in it.
    """
    try:
        folder = resolve(hf_assets_path)
    except UserError as e:
        raise UserError(f"model.hf_assets_path: {e}") from None
    if not folder.is_dir():
        raise UserError(
            f'model.hf_assets_path: folder "{hf_assets_path}" does not exist (working directory {Path.cwd()})'
        )
    if not any((folder / f).is_file() for f in _TOKENIZER_FILES):
        raise UserError(f'model.hf_assets_path: folder "{hf_assets_path}" holds no tokenizer.json')
    return folder


def tokenizer_digest(hf_assets_path: str) -> str:
    """SHA-256 over the tokenizer's files: the same for one tokenizer wherever it lies. Errors as `tokenizer_folder`."""
    folder = tokenizer_folder(hf_assets_path)
    present = [folder / f for f in _TOKENIZER_FILES if (folder / f).is_file()]
    if present[0].name == "tokenizer.json":
        present = present[:1]
    digest = hashlib.sha256()
    for file in present:
        content = file.read_bytes()
        digest.update(f"{file.name} {len(content)}\n".encode())
        digest.update(content)
    return digest.hexdigest()
