"""Files shipped inside the package, addressed as ``bundled:NAME`` wherever a setting takes a path."""

from pathlib import Path

from torchtitan_diloco.errors import UserError

PREFIX = "bundled:"
_FILES = {
    "kjv": "kjv/kjv.txt.gz",  # text: one document per chapter, documents separated by a blank line
    "bpe2048": "bpe2048",  # tokenizer folder
}


def resolve(path: str | Path) -> Path:
    """The path itself, or the file or folder of the package that ``bundled:NAME`` means.

    Raises UserError for a name that the package does not ship.
    """
    text = str(path)
    if not text.startswith(PREFIX):
        return Path(path)
    name = text.removeprefix(PREFIX)
    if name not in _FILES:
        known = ", ".join(PREFIX + key for key in sorted(_FILES))
        raise UserError(f"{text!r}: nothing of this name is bundled; there are {known}")
    return Path(__file__).parent / _FILES[name]
