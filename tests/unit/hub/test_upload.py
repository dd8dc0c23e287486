"""Bulk may come in any chunks and any order; the hub always knows exactly what is missing."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchtitan_diloco.hub.refusal import Refusal
from torchtitan_diloco.hub.upload import Upload

NBYTES = 40
CHUNKS = st.lists(st.tuples(st.integers(0, NBYTES), st.integers(0, 12)), max_size=30)


@given(CHUNKS)
def test_any_chunks_in_any_order_leave_just_what_has_not_come(chunks: list[tuple[int, int]]) -> None:
    content = bytes(range(1, NBYTES + 1))
    upload, here = Upload(NBYTES), set[int]()
    upload.data.zero_()
    for start, size in chunks:
        part = content[start : start + size]
        upload.write(start, part)
        here |= set(range(start, start + len(part)))
        missing = upload.missing()
        assert [i for a, b in missing for i in range(a, b)] == [i for i in range(NBYTES) if i not in here]
        assert all(a < b for a, b in missing)
        assert all(one[1] < other[0] for one, other in pairwise(missing))
        assert upload.complete == (len(here) == NBYTES)
    assert bytes(upload.data.numpy()) == bytes(content[i] if i in here else 0 for i in range(NBYTES))


@given(CHUNKS)
def test_sending_what_is_missing_completes_it(chunks: list[tuple[int, int]]) -> None:
    content = bytes(range(NBYTES))
    upload = Upload(NBYTES)
    for start, size in chunks:
        upload.write(start, content[start : start + size])
    for start, stop in upload.missing():
        upload.write(start, content[start:stop])
    assert upload.complete and bytes(upload.data.numpy()) == content


@pytest.mark.parametrize("start, size", [(-1, 2), (39, 2), (41, 1), (0, 41)])
def test_a_chunk_that_lies_outside_is_refused_and_changes_nothing(start: int, size: int) -> None:
    upload = Upload(NBYTES)
    with pytest.raises(ValueError, match="lie outside of 40"):
        upload.write(start, bytes(size))
    assert upload.missing() == [(0, NBYTES)]


def test_more_than_the_memory_holds_is_refused() -> None:
    with pytest.raises(Refusal, match="no memory for"):
        Upload(1 << 60)
