"""Ends of training that are told in one sentence, and those whose stack trace stays."""

import errno
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.api import CheckpointException, _wrap_exception

from torchtitan_diloco.island.misfortune import misfortune

FOLDER = Path("/run/island-0")


def full(number: int = errno.ENOSPC) -> OSError:
    return OSError(number, "No space left on device")


def later(cause: Exception) -> Exception:
    """An error in whose wake comes another, as of what is closed after it."""
    try:
        try:
            raise cause
        finally:
            raise RuntimeError("already closed")
    except RuntimeError as error:
        return error


@pytest.mark.parametrize(
    "error",
    [
        full(),
        full(errno.EDQUOT),
        full(errno.EFBIG),
        later(full()),
        CheckpointException("write", {1: _wrap_exception(full())}),
        RuntimeError(
            "[enforce fail at inline_container.cc:858] . PytorchStreamWriter failed writing file data/0"
        ),
    ],
    ids=["full", "quota", "limit", "in its wake", "of a rank", "torch's"],
)
def test_a_full_disk_is_named_with_the_folder_and_the_remedy(error: Exception) -> None:
    what = misfortune(error, FOLDER)
    assert what is not None and what.kind == "disk"
    assert what.sentence.startswith(
        "job.dump_folder: cannot write to /run/island-0: the disk is full; free some space"
    )


def test_a_real_write_to_a_full_device_is_known() -> None:
    """/dev/full: every write to it fails as on a full disk."""
    with pytest.raises((OSError, RuntimeError)) as failed, open("/dev/full", "wb") as file:
        torch.save({"w": torch.zeros(1_000_000)}, file)
    assert misfortune(failed.value, FOLDER) is not None


def test_a_loss_that_is_not_finite_is_told_with_its_step() -> None:
    words = "Loss is not finite (global_avg_loss=nan) at step 6. Stopping training."
    what = misfortune(RuntimeError(words), FOLDER)
    assert what is not None and what.kind == "loss"
    assert "of step 6 is not finite" in what.sentence and "optimizer.lr" in what.sentence


def test_torchtitan_still_says_it_in_these_words() -> None:
    import torchtitan.trainer

    assert "Loss is not finite (global_avg_loss=" in Path(torchtitan.trainer.__file__).read_text()


@pytest.mark.parametrize(
    "error", [OSError(errno.EACCES, "Permission denied"), RuntimeError("boom"), KeyError("x")]
)
def test_whatever_else_happens_may_be_a_defect(error: Exception) -> None:
    assert misfortune(error, FOLDER) is None


def test_errors_that_stand_for_each_other_are_looked_at_once() -> None:
    one, other = RuntimeError("a"), RuntimeError("b")
    one.__context__, other.__context__ = other, one
    assert misfortune(one, FOLDER) is None
