"""Settings on the command line of a command that takes a TOML file."""

from collections.abc import Sequence

from torchtitan_diloco.config.fields import keys


def split_overrides(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """(the command's own arguments, the `--section.key [value]` ones).

    A boolean key may stand alone; after any other key, known or not, the next word is its value unless it starts with
    `--`.
    """
    own: list[str] = []
    overrides: list[str] = []
    words = list(argv)
    while words:
        word = words.pop(0)
        if not (word.startswith("--") and "." in word.partition("=")[0]):
            own.append(word)
            continue
        overrides.append(word)
        kind = keys().get(word[2:].replace("-", "_"))
        alone = kind is not None and kind.base == "bool" and words[:1] not in (["true"], ["false"])
        if not alone and "=" not in word and words and not words[0].startswith("--"):
            overrides.append(words.pop(0))
    return own, overrides
