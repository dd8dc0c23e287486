"""Secrets in files, and the door they open."""

from pathlib import Path

import pytest

from torchtitan_diloco.errors import UserError
from torchtitan_diloco.hub.access import FAILURES, ISLANDS, PEERS, READERS, WINDOW_S, Access
from torchtitan_diloco.hub.refusal import Refusal
from torchtitan_diloco.hub.tokens import digest, read_token, read_tokens

SECRET = "s3cret-" + "x" * 20


def written(folder: Path, text: str, mode: int = 0o600) -> str:
    path = folder / "tokens.toml"
    path.write_text(text)
    path.chmod(mode)
    return str(path)


def test_tokens_are_read_by_name_and_kept_as_digests(tmp_path: Path) -> None:
    found = read_tokens(written(tmp_path, f'island-0 = "{SECRET}"\noperator = "{SECRET}2"\n'))
    assert found == {"island-0": digest(SECRET), "operator": digest(SECRET + "2")}
    assert SECRET not in repr(found)
    assert read_token(written(tmp_path, f"{SECRET}\n")) == SECRET


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o644, 0o660, 0o620])
def test_a_file_that_others_can_read_is_refused_with_the_remedy(tmp_path: Path, mode: int) -> None:
    path = written(tmp_path, f'island-0 = "{SECRET}"', mode)
    for read, setting in ((read_tokens, "syncer.tokens"), (read_token, "transport.token_file")):
        with pytest.raises(UserError, match=rf"^{setting}: .*; run `chmod 600 {path}`$"):
            read(path)


@pytest.mark.parametrize(
    "text, says",
    [
        ("", "names nobody"),
        (f'island-0 = "{SECRET}" oops', "is no TOML (at line 1)"),
        (f'island-0 = "{SECRET}', "is no TOML (at "),
        (f'island-00 = "{SECRET}"', "names 'island-00'"),
        (f'admin = "{SECRET}"', "names 'admin'"),
        ('island-0 = "short"', "island-0 needs a token of at least 16 visible ASCII characters"),
        (f'island-0 = "{SECRET} {SECRET}"', "island-0 needs a token"),
        ("island-0 = 1234567890123456", "island-0 needs a token"),
        (f'island-0 = "{SECRET}"\nreader = "{SECRET}"', "reader has the token of another"),
    ],
)
def test_a_mistake_in_the_tokens_is_named_and_no_token_quoted(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(UserError) as mistake:
        read_tokens(written(tmp_path, text))
    assert str(mistake.value).startswith("syncer.tokens: ") and says in str(mistake.value)
    assert SECRET not in str(mistake.value)


@pytest.mark.parametrize("text", ["", "short", f"{SECRET}\n{SECRET}", "\x00" * 20])
def test_a_token_file_holds_one_token(tmp_path: Path, text: str) -> None:
    with pytest.raises(UserError, match=r"^transport\.token_file: .* must hold a token") as mistake:
        read_token(written(tmp_path, text))
    assert SECRET not in str(mistake.value)


def test_a_missing_file_is_named_with_its_setting(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"^syncer\.tokens: .*nothing cannot be read"):
        read_tokens(str(tmp_path / "nothing"))
    path = tmp_path / "bytes"
    path.write_bytes(b"\xff\xfe" + SECRET.encode())
    path.chmod(0o600)
    with pytest.raises(UserError, match=r"^transport\.token_file: .* is no text"):
        read_token(str(path))


class Clock:
    def __init__(self) -> None:
        self.time = 0.0

    def __call__(self) -> float:
        return self.time


def door(clock: Clock) -> Access:
    return Access({"island-0": digest(SECRET), "reader": digest(SECRET + "r")}, clock)


def knock(access: Access, token: str | None, peer: str = "192.0.2.1", island: str = "0") -> str:
    try:
        access.check(ISLANDS, island, token and f"Bearer {token}", peer)
    except Refusal as refusal:
        return refusal.kind
    return "in"


def test_an_island_acts_as_itself_only() -> None:
    access = door(Clock())
    assert knock(access, SECRET) == "in"
    for island in ("1", "00", "+0", " 0", "", "0,0"):
        assert knock(access, SECRET, island=island) == "forbidden"
    assert knock(access, SECRET + "r") == "forbidden"
    assert knock(access, None) == "forbidden"
    access.check(READERS, None, f"bearer {SECRET}r", "192.0.2.1")
    for header in (SECRET, f"Basic {SECRET}", "Bearer", "Bearer ", f"Bearer {SECRET}x", "Bearer \udcff"):
        with pytest.raises(Refusal):
            access.check(ISLANDS, "0", header, "192.0.2.2")


def test_guessing_from_an_address_is_slowed_down_and_no_other_address_suffers() -> None:
    clock = Clock()
    access = door(clock)
    for _ in range(FAILURES):
        assert knock(access, "guess") == "forbidden"
    assert knock(access, "guess") == knock(access, SECRET) == "busy"
    assert knock(access, SECRET, peer="192.0.2.2") == "in"
    clock.time = WINDOW_S - 0.1
    assert knock(access, SECRET) == "busy"
    clock.time = WINDOW_S + 0.1
    assert knock(access, SECRET) == "in"


def test_right_tokens_and_none_at_all_do_not_count_as_guesses() -> None:
    access = door(Clock())
    for _ in range(3 * FAILURES):
        assert knock(access, None) == "forbidden"
        assert knock(access, SECRET, island="1") == "forbidden"
        assert knock(access, SECRET) == "in"


def test_one_ipv6_host_is_one_address() -> None:
    access = door(Clock())
    for i in range(FAILURES):
        assert knock(access, "guess", peer=f"2001:db8::{i:x}") == "forbidden"
    assert knock(access, SECRET, peer="2001:db8::ffff") == "busy"
    assert knock(access, SECRET, peer="2001:db8:0:1::1") == "in"


def test_what_is_remembered_of_guesses_is_bounded() -> None:
    access = door(Clock())
    for i in range(3 * PEERS):
        knock(access, "guess", peer=f"10.{i >> 16}.{(i >> 8) & 255}.{i & 255}")
    assert len(access._failures) <= PEERS
