#!/usr/bin/env python3
"""Rebuild the bundled text and tokenizer.

Run ``sudo apt-get install bible-kjv`` and then ``python scripts/build_assets.py``.

The result depends on the Debian package (4.38) and this file only; ``--output`` writes elsewhere, for a comparison.
"""

import argparse
import gzip
import itertools
import json
import re
import subprocess
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

ASSETS = Path(__file__).resolve().parent.parent / "torchtitan_diloco" / "assets"
VOCAB_SIZE = 2048
BOS, EOS = "<|begin_of_text|>", "<|end_of_text|>"
VERSES, CHAPTERS, BOOKS = 31_102, 1_189, 66
VERSE = re.compile(r"([1-3]?[A-Z][A-Za-z]+)(\d+):(\d+) (\S.*)")
# Headings, in the order in which the package prints the books (it abbreviates their names).
# fmt: off
NAMES = [
    "Genesis", "Exodus", "Leviticus", "Numbers", "Deuteronomy", "Joshua", "Judges", "Ruth", "1 Samuel",
    "2 Samuel", "1 Kings", "2 Kings", "1 Chronicles", "2 Chronicles", "Ezra", "Nehemiah", "Esther",
    "Job", "Psalm", "Proverbs", "Ecclesiastes", "Song of Solomon", "Isaiah", "Jeremiah", "Lamentations",
    "Ezekiel", "Daniel", "Hosea", "Joel", "Amos", "Obadiah", "Jonah", "Micah", "Nahum", "Habakkuk",
    "Zephaniah", "Haggai", "Zechariah", "Malachi", "Matthew", "Mark", "Luke", "John", "Acts", "Romans",
    "1 Corinthians", "2 Corinthians", "Galatians", "Ephesians", "Philippians", "Colossians",
    "1 Thessalonians", "2 Thessalonians", "1 Timothy", "2 Timothy", "Titus", "Philemon", "Hebrews",
    "James", "1 Peter", "2 Peter", "1 John", "2 John", "3 John", "Jude", "Revelation",
]
# fmt: on


def read_verses() -> list[tuple[str, int, str]]:
    """(abbreviated book, chapter, text) of every verse, from the installed ``bible`` command."""
    out = subprocess.run(["bible", "-f", "Gen1:1-Rev22:21"], check=True, capture_output=True).stdout.decode(
        "ascii"
    )
    verses = []
    for line in out.splitlines():
        match = VERSE.fullmatch(line)
        if match is None:
            raise SystemExit(f"unexpected line from the bible command: {line!r}")
        verses.append((match[1], int(match[2]), " ".join(match[4].split())))
    return verses


def build_text(verses: list[tuple[str, int, str]]) -> str:
    """One document per chapter (heading, then a verse a line), documents separated by a blank line."""
    documents, books = [], []
    for (book, chapter), group in itertools.groupby(verses, key=lambda verse: verse[:2]):
        if book not in books:
            books.append(book)
        documents.append(
            "\n".join([f"{NAMES[books.index(book)]} {chapter}", *(text for _, _, text in group)])
        )
    counts = (len(books), len(documents), len(verses))
    if counts != (BOOKS, CHAPTERS, VERSES):
        raise SystemExit(f"expected {(BOOKS, CHAPTERS, VERSES)} books, chapters and verses, found {counts}")
    return "\n\n".join(documents) + "\n"


def train_tokenizer(text: str) -> Tokenizer:
    """Byte-level BPE (GPT-2's splitting rule) of VOCAB_SIZE entries; BOS is 0, EOS is 1."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[BOS, EOS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(text.split("\n\n"), trainer)
    return tokenizer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=ASSETS, help="assets folder to write into")
    output = parser.parse_args().output
    for name in ("kjv", "bpe2048"):
        (output / name).mkdir(parents=True, exist_ok=True)
    text = build_text(read_verses())
    # mtime=0 and no file name: the same bytes whenever and wherever it is built with one zlib.
    (output / "kjv" / "kjv.txt.gz").write_bytes(gzip.compress(text.encode("ascii"), 9, mtime=0))
    train_tokenizer(text).save(str(output / "bpe2048" / "tokenizer.json"))
    settings = {
        "bos_token": BOS,
        "eos_token": EOS,
        "model_max_length": 1 << 20,
        "clean_up_tokenization_spaces": False,
    }
    (output / "bpe2048" / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")


if __name__ == "__main__":
    main()
