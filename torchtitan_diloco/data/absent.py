"""What to do where no prepared corpus is: the command that prepares one, for what lies there instead."""

import json
import re
import shlex
from pathlib import Path

_SHARD = re.compile(r"data-\d{5}\.arrow")
# Of Hugging Face datasets: Dataset.save_to_disk and DatasetDict.save_to_disk.
_DATASET, _DATASET_DICT = "state.json", "dataset_dict.json"


def remedy(path: str | Path, *, tokenizer: str | Path = "TOKENIZER", seq_len: int | str = "N") -> str:
    """One clause, and the command where it can be known; input that lies at `path` is left where it is."""
    there = Path(path)
    words = ["--tokenizer", str(tokenizer), "--seq-len", str(seq_len)]
    if holds_corpus_files(there):
        again = ["data", "prepare", "--input", "FILE", *words, "--output", str(path)]
        return (
            "the folder holds a corpus without its manifest.json; copy that back (`torchtitan-diloco data verify "
            f"{shlex.quote(str(path))}` checks the rest), or remove the folder and run "
            f"`torchtitan-diloco {shlex.join(again)}`"
        )
    source, output, then = "FILE", str(path), ""
    if (split := _dataset(there)) is not None:
        what, source = "it is a folder of Hugging Face datasets", str(split)
    elif there.is_file():
        what, source = "it is a file", str(there)
    elif there.is_dir() and any(there.iterdir()):
        what, output = "the folder holds something else", "FOLDER"
    else:
        what = "nothing is there"
    if source != "FILE":
        output = str(there.with_name(f"{there.name}-prepared"))
    if output != str(path):
        then = f", and give {output}"
    words = ["--input", source, *words, "--output", output]
    return f"{what}; run `torchtitan-diloco data prepare {shlex.join(words)}`{then}"


def holds_corpus_files(folder: Path) -> bool:
    """Whether `data prepare` has written it: `datasets` says in a file's name how many there are."""
    return any(_SHARD.fullmatch(file.name) for file in folder.glob("data-*.arrow"))


def _dataset(folder: Path) -> Path | None:
    """The folder itself, or its first split; None where it is none of Hugging Face datasets."""
    if (folder / _DATASET).is_file():
        return folder
    try:
        splits = json.loads((folder / _DATASET_DICT).read_text())["splits"]
        return folder / str(splits[0])
    except (OSError, ValueError, KeyError, TypeError, IndexError, RecursionError):
        return None
