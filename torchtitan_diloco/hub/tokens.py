"""Secrets in files: who may do what at a hub, and the one token that an island has."""

import hashlib
import os
import re
import shlex
import tomllib
from collections.abc import Mapping
from typing import Any

from torchtitan_diloco.errors import UserError

OPERATOR, READER = "operator", "reader"
SHORTEST = 16
_NAME = re.compile(rf"island-(0|[1-9][0-9]*)|{OPERATOR}|{READER}")
_TOKEN = re.compile(rf"[\x21-\x7e]{{{SHORTEST},}}")
_MAKE = "make one with `openssl rand -hex 32`"
_LIMIT = 1 << 20  # bytes


def digest(token: str) -> bytes:
    """Tokens are kept and compared as digests: of one length, and nothing that is printed by mistake gives one away."""
    return hashlib.sha256(token.encode("utf-8", "replace")).digest()


def read_tokens(path: str) -> dict[str, bytes]:
    """Name -> digest of its token: of ``syncer.tokens``. Raises UserError, in which no token is quoted."""
    try:
        entries = tomllib.loads(_read(path, "syncer.tokens"))
    except tomllib.TOMLDecodeError as error:
        where = re.search(r"at (line \d+)|at end", str(error))
        raise UserError(
            f"syncer.tokens: {path} is no TOML ({where[0] if where else 'malformed'}); write lines such as "
            'island-0 = "TOKEN"'
        ) from None
    return _checked(path, entries)


def _checked(path: str, entries: Mapping[str, Any]) -> dict[str, bytes]:
    found: dict[str, bytes] = {}
    for name, token in entries.items():
        if not _NAME.fullmatch(name):
            raise UserError(
                f"syncer.tokens: {path} names {name!r}; names are island-0, island-1 and so on, {OPERATOR} and {READER}"
            )
        if not isinstance(token, str) or not _TOKEN.fullmatch(token):
            raise UserError(f"syncer.tokens: {path}: {name} needs {_rule()}; {_MAKE}")
        hashed = digest(token)
        if hashed in found.values():
            raise UserError(f"syncer.tokens: {path}: {name} has the token of another; {_MAKE}")
        found[name] = hashed
    if not found:
        raise UserError(f'syncer.tokens: {path} names nobody; write lines such as island-0 = "TOKEN"')
    return found


def read_token(path: str) -> str:
    """An island's own: of ``transport.token_file``. Raises UserError, in which the token is not quoted."""
    return _read_one(path, "transport.token_file", "ask for it where the hub runs")


def read_secret(path: str) -> str:
    """That of a hub and its workers: of ``syncer.worker_secret``. Raises UserError, in which it is not quoted."""
    return _read_one(path, "syncer.worker_secret", f"{_MAKE} and copy it to each worker")


def _read_one(path: str, setting: str, remedy: str) -> str:
    token = _read(path, setting).strip()
    if not _TOKEN.fullmatch(token):
        raise UserError(f"{setting}: {path} must hold {_rule()}, on one line and alone; {remedy}")
    return token


def _rule() -> str:
    return f"a token of at least {SHORTEST} visible ASCII characters"


def _read(path: str, setting: str) -> str:
    try:
        with open(path, "rb") as file:
            if os.fstat(file.fileno()).st_mode & 0o066:
                raise UserError(
                    f"{setting}: others than its owner may read or write {path}; run `chmod 600 {shlex.quote(path)}`"
                )
            return file.read(_LIMIT).decode()
    except OSError as error:
        raise UserError(
            f"{setting}: {path} cannot be read ({error.strerror}); correct the path or its rights"
        ) from None
    except UnicodeDecodeError:
        raise UserError(f"{setting}: {path} is no text; give the file with the tokens") from None
