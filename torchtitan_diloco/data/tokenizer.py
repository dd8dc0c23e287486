"""The tokenizer of a corpus: TorchTitan's own class, in batches, and the hash that tells two tokenizers apart."""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from torchtitan_diloco.errors import UserError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

# Files that TorchTitan's HuggingFaceTokenizer takes a vocabulary from; the first one alone if it is there.
VOCABULARY_FILES = ("tokenizer.json", "vocab.json", "vocab.txt", "merges.txt")
SPECIAL_KEYS = tuple(f"{name}_token" for name in ("bos", "eos", "pad", "unk", "sep", "cls", "mask"))


def tokenizer_sha256(folder: Path, *, setting: str = "model.hf_assets_path") -> str:
    """Hash of all that decides the ids of a text: vocabulary files and declared special tokens; no chat templates.

    Raises UserError naming `setting` when the folder holds no tokenizer.
    """
    present = [name for name in VOCABULARY_FILES if (folder / name).is_file()]
    if not present:
        raise UserError(
            f"{setting}: no tokenizer.json in {folder}; give a folder that holds a Hugging Face tokenizer"
        )
    used = present[:1] if present[0] == "tokenizer.json" else present
    config_file = folder / "tokenizer_config.json"
    try:
        content = {name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in used}
        config = json.loads(config_file.read_text(encoding="utf-8")) if config_file.is_file() else {}
    except OSError as error:
        raise UserError(
            f"{setting}: cannot read the tokenizer in {folder}: {error.strerror or error}"
        ) from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"{setting}: {config_file} is not JSON ({error})") from error
    if not isinstance(config, dict):
        raise UserError(f"{setting}: {config_file} is not a JSON object")
    special = {key: config[key] for key in (*SPECIAL_KEYS, "added_tokens_decoder") if config.get(key)}
    return hashlib.sha256(json.dumps([content, special], sort_keys=True).encode()).hexdigest()


def load_tokenizer(file: Path, setting: str) -> "Tokenizer":
    """That of a ``tokenizer.json``. Raises UserError naming ``setting`` when it is damaged or without entries."""
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # the tokenizers library raises plain Exception for a damaged file
        raise UserError(
            f"{setting}: the tokenizer {file} cannot be loaded ({error}); copy it again or give another"
        ) from error
    if not tokenizer.get_vocab_size():
        raise UserError(f"{setting}: the tokenizer {file} has no entries; copy it again or give another")
    return tokenizer


class CorpusTokenizer:
    """Encodes documents as TorchTitan's text loader does, with BOS and EOS, but in batches and on all cores.

    Raises UserError naming `setting` when the folder holds no usable tokenizer or one without an end-of-text
    token.
    """

    def __init__(self, folder: Path, *, setting: str = "model.hf_assets_path") -> None:
        self.sha256 = tokenizer_sha256(folder, setting=setting)
        # Not at the top of the file: this imports torch (2 s), which inspecting a corpus does not need.
        from torchtitan.components.tokenizer import HuggingFaceTokenizer

        try:
            self._wrapper = HuggingFaceTokenizer(tokenizer_path=str(folder))
        except Exception as error:  # the tokenizers library raises plain Exception for a damaged file
            raise UserError(f"{setting}: the tokenizer in {folder} cannot be loaded: {error}") from error
        if self._wrapper.eos_id is None:
            raise UserError(
                f"{setting}: the tokenizer in {folder} has no end-of-text token; "
                'set "eos_token" in its tokenizer_config.json'
            )
        self._tokenizer = self._wrapper.tokenizer
        # A batch would otherwise be padded to its longest document.
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        self.bos_id: int | None = self._wrapper.bos_id
        self.eos_id: int = self._wrapper.eos_id
        self.vocab_size: int = max(self._tokenizer.get_vocab().values()) + 1
        """Largest id plus one: vocabularies may have holes."""
        self.dtype: npt.DTypeLike = np.dtype(np.uint16 if self.vocab_size <= 1 << 16 else np.uint32)
        self._prefix = [self.bos_id] if self.bos_id is not None and not self._wrapper.hf_adds_bos else []
        self._suffix = [] if self._wrapper.hf_adds_eos else [self.eos_id]

    def encode(self, texts: Sequence[str]) -> list[npt.NDArray[np.unsignedinteger]]:
        """One array of ids per text, BOS and EOS included, in the corpus' dtype."""
        encodings = self._tokenizer.encode_batch_fast(list(texts))
        return [np.array([*self._prefix, *e.ids, *self._suffix], dtype=self.dtype) for e in encodings]

    @property
    def prefix(self) -> tuple[int, ...]:
        """Ids before those of every text."""
        return tuple(self._prefix)

    @property
    def suffix(self) -> tuple[int, ...]:
        """Ids after those of every text."""
        return tuple(self._suffix)

    def to_json(self) -> str:
        """The tokenizer itself, as the ``tokenizers`` library writes it."""
        return str(self._tokenizer.to_str())
