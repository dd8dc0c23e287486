"""Toy documents made of numbered words, for the toy tokenizer of tests/unit/data/conftest.py."""

import random

BOS, EOS = 0, 1


def word(number: int) -> str:
    """The word whose id is `number` (from 2 on)."""
    return f"w{number}"


def numbered_documents(count: int, seed: int = 0) -> list[str]:
    """Documents of 1 to 12 words out of w2 ... w99; reproducible."""
    rng = random.Random(seed)
    return [" ".join(word(rng.randrange(2, 100)) for _ in range(rng.randrange(1, 13))) for _ in range(count)]
