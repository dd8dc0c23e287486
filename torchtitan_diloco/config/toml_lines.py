"""On which line of a TOML text each key stands: what a TOML parser throws away and an error message needs."""

import re
from bisect import bisect_right

import tomli

Path = tuple[str | int, ...]
"""Keys and, for arrays, indexes: ``("data", "sources", 0, "path")``."""

_STRINGS = [
    re.compile(r'"""(?:[^\\]|\\.)*?"""(?:"{0,2})', re.DOTALL),
    re.compile(r"'''.*?'''(?:'{0,2})", re.DOTALL),
    re.compile(r'"(?:[^"\\\n]|\\.)*"'),
    re.compile(r"'[^'\n]*'"),
]
_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")
_SCALAR = re.compile(r"[^,\]}\n#]+")
_BLANK = re.compile(r"(?:[ \t\r\n]|#[^\n]*)*")
_SPACE = re.compile(r"[ \t]*")


def key_lines(text: str) -> dict[Path, int]:
    """Line (from 1) of every key, table header and array item of a TOML text that a parser has already accepted.

    Of a table opened several times the first line counts.
    """
    return _Scanner(text).run()


class _Scanner:
    def __init__(self, text: str) -> None:
        self.text = text
        self.pos = 0
        self.newlines = [i for i, c in enumerate(text) if c == "\n"]
        self.lines: dict[Path, int] = {}
        self.counts: dict[Path, int] = {}

    def run(self) -> dict[Path, int]:
        prefix: Path = ()
        while self.skip(_BLANK) < len(self.text):
            if self.take("[["):
                *parents, last = self.key()
                array = self.resolve(tuple(parents))
                array = (*array, last)
                n = self.counts.get(array, 0)
                self.counts[array] = n + 1
                prefix = (*array, n)
                self.record(prefix)
                self.expect("]]")
            elif self.take("["):
                prefix = self.resolve(self.key())
                self.record(prefix)
                self.expect("]")
            else:
                self.pair(prefix)
        return self.lines

    def resolve(self, key: tuple[str, ...]) -> Path:
        """A header's names with the index of the open element of every array of tables among them."""
        path: Path = ()
        for part in key:
            path = (*path, part)
            if path in self.counts:
                path = (*path, self.counts[path] - 1)
        return path

    def pair(self, prefix: Path) -> None:
        path = (*prefix, *self.key())
        self.record(path)
        self.expect("=")
        self.value(path)

    def key(self) -> tuple[str, ...]:
        parts: list[str] = []
        while True:
            self.skip(_SPACE)
            if self.text[self.pos] in "\"'":
                parts.append(tomli.loads(f"k = {self.string()}")["k"])
            else:
                parts.append(self.match(_BARE_KEY))
            self.skip(_SPACE)
            if not self.take("."):
                return tuple(parts)

    def value(self, path: Path) -> None:
        self.skip(_SPACE)
        if self.text[self.pos] in "\"'":
            self.string()
        elif self.take("["):
            index = 0
            while self.skip(_BLANK) >= 0 and not self.take("]"):
                self.record((*path, index))
                self.value((*path, index))
                index += 1
                self.skip(_BLANK)
                self.take(",")
        elif self.take("{"):
            while self.skip(_BLANK) >= 0 and not self.take("}"):
                self.pair(path)
                self.skip(_BLANK)
                self.take(",")
        else:
            self.match(_SCALAR)

    def string(self) -> str:
        for pattern in _STRINGS:
            found = pattern.match(self.text, self.pos)
            if found:
                self.pos = found.end()
                return found.group()
        raise ValueError(f"no string at offset {self.pos}")

    def record(self, path: Path) -> None:
        line = bisect_right(self.newlines, self.pos - 1) + 1
        for n in range(1, len(path) + 1):
            self.lines.setdefault(path[:n], line)

    def skip(self, pattern: re.Pattern[str]) -> int:
        self.match(pattern)
        return self.pos

    def match(self, pattern: re.Pattern[str]) -> str:
        found = pattern.match(self.text, self.pos)
        if not found:
            raise ValueError(f"unexpected text at offset {self.pos}")
        self.pos = found.end()
        return found.group()

    def take(self, token: str) -> bool:
        if self.text.startswith(token, self.pos):
            self.pos += len(token)
            return True
        return False

    def expect(self, token: str) -> None:
        if not self.take(token):
            raise ValueError(f"expected {token!r} at offset {self.pos}")
