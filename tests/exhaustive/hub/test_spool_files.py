"""Spool files: only what is whole and undamaged is a message, whatever lies in the folder."""

import hashlib
import json
import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchtitan_diloco.hub.spool_files import Inbox, Name, Outbox
from torchtitan_diloco.outer.policy import Member

ME = Member(2, "a")


@pytest.fixture
def folders(tmp_path_factory):
    base = tmp_path_factory.mktemp("spool")
    return base / "up", base / "refused"


def send(folder: Path, sequence: int = 1, body: dict | None = None, payload: bytes = b"payload") -> str:
    out = Outbox(folder)
    part = out.part("slot-3", ME, sequence, memoryview(payload))
    return out.send("slot-3", ME, sequence, 5.0, body or {"x": 1}, {"payload": part})


def part_of(folder: Path) -> Path:
    return next(folder.glob("*.bin"))


def test_a_message_is_read_once_with_its_parts(folders):
    name = send(folders[0])
    inbox = Inbox(*folders)
    (message,) = inbox.scan()
    assert (str(message.name), message.member, message.started, message.body) == (name, ME, 5.0, {"x": 1})
    assert message.parts["payload"].read_bytes() == b"payload"
    assert inbox.scan() == []
    inbox.again(ME, 1)
    assert len(inbox.scan()) == 1


def test_a_manifest_waits_for_its_parts(folders):
    send(folders[0])
    part = part_of(folders[0])
    data = part.read_bytes()
    part.unlink()
    inbox = Inbox(*folders)
    assert inbox.scan() == []
    part.write_bytes(data)
    assert len(inbox.scan()) == 1 and inbox.refused == []


def test_an_undamaged_copy_takes_the_place_of_a_damaged_one(folders):
    send(folders[0])
    part = part_of(folders[0])
    part.write_bytes(b"damaged")
    inbox = Inbox(*folders)
    assert inbox.scan() == [] and inbox.refused == [part.name]
    assert (folders[1] / part.name).read_bytes() == b"damaged"
    assert "is not what its name says" in (folders[1] / f"{part.name[:200]}.why").read_text()
    part.write_bytes(b"payload")
    assert len(inbox.scan()) == 1 and inbox.refused == []


def test_links_pipes_and_folders_are_not_opened(folders, tmp_path):
    name = send(folders[0])
    secret = tmp_path / "secret"
    secret.write_bytes((folders[0] / name).read_bytes())
    (folders[0] / name).unlink()
    os.symlink(secret, folders[0] / name)
    os.mkfifo(folders[0] / str(Name("note", ME, 7, 64 * "0", "json")))
    (folders[0] / str(Name("note", ME, 8, 64 * "0", "json"))).mkdir()
    inbox = Inbox(*folders)
    assert inbox.scan() == []
    assert len(inbox.refused) == 3
    assert inbox.scan() == []


@pytest.mark.parametrize(
    "content",
    [
        [], 1, None, {}, {"format": 2}, {"format": 1, "started": "x", "body": {}, "parts": {}},
        {"format": 1, "started": 1.0, "body": [], "parts": {}},
        {"format": 1, "started": float("nan"), "body": {}, "parts": {}},
        {"format": 1, "started": 1.0, "body": {}, "parts": []},
        {"format": 1, "started": 1.0, "body": {}, "parts": {"payload": {"file": "../../etc/passwd", "bytes": 1}}},
        {"format": 1, "started": 1.0, "body": {}, "parts": {"../x": {"file": "x", "bytes": 1}}},
        {"format": 1, "started": 1.0, "body": {}, "parts": {"payload": {"file": 5, "bytes": "x"}}},
    ],
)  # fmt: skip
def test_what_is_no_manifest_is_set_aside_though_its_hash_is_right(folders, content):
    data = json.dumps(content).encode()
    inbox = Inbox(*folders)
    name = str(Name("note", ME, 1, hashlib.sha256(data).hexdigest(), "json"))
    (folders[0] / name).write_bytes(data)
    assert inbox.scan() == [] and inbox.refused == [name]


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_no_folder_is_too_strange(tmp_path_factory, data):
    """Truncated, flipped, doubled, renamed: what is given out is what was sent, and nothing raises."""
    base = tmp_path_factory.mktemp("fuzz")
    up, refused = base / "up", base / "refused"
    sent = {send(up, sequence, {"n": sequence}, bytes([sequence] * 40)): sequence for sequence in range(1, 4)}
    for path in sorted(up.iterdir()):
        content = bytearray(path.read_bytes())
        harm = data.draw(st.sampled_from(["none", "cut", "flip", "rename", "gone", "swap", "double"]))
        if harm == "cut":
            path.write_bytes(content[: data.draw(st.integers(0, len(content) - 1))])
        elif harm == "flip":
            content[data.draw(st.integers(0, len(content) - 1))] ^= 1 << data.draw(st.integers(0, 7))
            path.write_bytes(bytes(content))
        elif harm == "rename":
            text = st.text(st.characters(exclude_characters="/\0", codec="utf-8"), min_size=1, max_size=60)
            other = data.draw(text.filter(lambda t: t not in (".", "..")))
            path.rename(up / other)
        elif harm == "gone":
            path.unlink()
        elif harm == "swap":
            parsed = Name.parse(path.name)
            if parsed is not None:
                path.rename(
                    up / str(Name(parsed.kind, ME, parsed.sequence + 1, parsed.sha256, parsed.suffix))
                )
        elif harm == "double":
            (up / f"{path.name}.copy").write_bytes(bytes(content))
    inbox = Inbox(up, refused)
    for message in [*inbox.scan(), *inbox.scan()]:
        number = message.body["n"]
        assert message.parts["payload"].read_bytes() == bytes([number] * 40)
        assert number in sent.values()


@given(st.text(max_size=120))
def test_only_names_that_are_written_so_are_read_so(text):
    name = Name.parse(text)
    assert name is None or str(name) == text


def test_a_name_survives_the_round_trip():
    name = Name("withdraw-12", Member(3, "2026-11-30_ab"), 17, 64 * "f", "bin")
    assert Name.parse(str(name)) == name


def test_what_a_killed_writer_has_left_is_swept_away_and_nothing_else(folders):
    name = send(folders[0])
    out = Outbox(folders[0])
    out.part("slot-4", ME, 2, memoryview(b"no manifest names it"))
    (folders[0] / f".{Name('slot-5', ME, 3, 64 * '0', 'bin')}.4711").write_bytes(b"half")
    (folders[0] / f".{Name('slot-5', Member(1, 'a'), 3, 64 * '0', 'bin')}.4711").write_bytes(
        b"another island's"
    )
    out.sweep(lambda n: n.member.island == 2)
    assert len(list(folders[0].glob(".*"))) == 1
    assert {n.sequence for n in out.names(lambda n: True)} == {1}
    out.remove(lambda n: n.sequence == 1)
    assert not (folders[0] / name).exists() and out.names(lambda n: True) == []


def test_a_folder_that_the_mirror_has_deleted_is_an_empty_one(folders):
    inbox = Inbox(*folders)
    folders[0].rmdir()
    assert inbox.scan() == []
    send(folders[0])
    assert len(inbox.scan()) == 1
