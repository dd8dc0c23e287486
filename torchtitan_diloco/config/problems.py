"""What is wrong with a configuration: collected while loading, reported all at once."""

import re
from dataclasses import dataclass, field

from torchtitan_diloco.errors import UserError

CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")
_SECRETS = re.compile(r"""(://)[^\s"']*@|(?<![^\s"'(\[,])[^\s"':/@]+:[^\s"'/@]+@""")
COMMAND_LINE = "command line"
DEFAULT = "default"


def without_secrets(text: str) -> str:
    """The text with "..." for user and password of each address in it: what is wrong with one ends up in logs."""
    return _SECRETS.sub(lambda match: f"{match[1] or ''}...@", text)


class ConfigError(UserError):
    """The configuration is unusable; ``problems`` holds one line each and the message is all of them."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


@dataclass(slots=True)
class Problems:
    """Collects problems of one file and the command line."""

    file: str
    found: list[tuple[bool, int, str]] = field(default_factory=list)

    def add(self, where: int | str | None, key: str, message: str) -> None:
        """``where``: a line number, `COMMAND_LINE`, or None for the file as a whole."""
        if where == COMMAND_LINE:
            prefix, order = COMMAND_LINE, 0
        elif isinstance(where, int):
            prefix, order = f"{self.file}:{where}", where
        else:
            prefix, order = self.file, 0
        message = without_secrets(message)
        text = f"{prefix}: {key}: {message}" if key else f"{prefix}: {message}"
        text = CONTROL.sub(
            lambda m: repr(m[0])[1:-1], text
        )  # one problem is one line, whatever the file holds
        self.found.append((where == COMMAND_LINE, order, text))

    def add_syntax_error(self, text: str, error: Exception) -> None:
        """What a parser of TOML says about a text, at its line."""
        at = re.search(r" \(at (?:line (\d+), column (\d+)|end of document)\)$", str(error))
        line = int(at[1]) if at and at[1] else text.count("\n") + 1 if at else None
        column = f" (column {at[2]})" if at and at[2] else ""
        what = str(error)[: at.start()] if at else str(error)
        self.add(line, "", f"is not valid TOML: {what}{column}")

    def raise_if_any(self) -> None:
        """Raise `ConfigError` with the problems in the order of the file's lines, then those of the command line."""
        if self.found:
            unique = dict.fromkeys(text for _, _, text in sorted(self.found, key=lambda f: f[:2]))
            raise ConfigError(list(unique))
