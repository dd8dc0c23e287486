"""TorchTitan v0.2's [fault_tolerance] table, semi-synchronous training with TorchFT, as our own settings."""

from typing import Any

from torchtitan_diloco.config.names import nearest_choice
from torchtitan_diloco.config.reader import Reader
from torchtitan_diloco.config.retired import FAULT_TOLERANCE_MOVED, FAULT_TOLERANCE_RETIRED
from torchtitan_diloco.config.values import describe

SECTION = "fault_tolerance"
_DEFAULT_SYNC_STEPS = 5
"""What TorchTitan v0.2 took where ``sync_steps`` was absent."""


def read_fault_tolerance(reader: Reader, written: Any) -> None:
    """Take the table over into the reader's layer, whose own sections have been read already."""
    here = (*reader.root, SECTION)
    if not isinstance(written, dict):
        reader.problem(here, f"must be a table, written [{SECTION}], got {describe(written)}")
        return
    enable = written.get("enable")
    if not isinstance(enable, bool):
        what = "is missing" if enable is None else f"must be true or false, got {describe(enable)}"
        reader.problem(
            (*here, "enable"),
            f"{what}; true takes the table over as [semi_sync], false leaves it without effect",
        )
    known = [f"{SECTION}.enable", *FAULT_TOLERANCE_MOVED, *FAULT_TOLERANCE_RETIRED]
    for name, value in written.items():
        key, path = f"{SECTION}.{name}", (*here, name)
        if key not in known:
            near = nearest_choice(key, known)
            reader.problem(path, f"unknown key; did you mean {near}?" if near else "unknown key")
        elif key in FAULT_TOLERANCE_MOVED and enable:
            reader.moved(path, value, FAULT_TOLERANCE_MOVED[key])
        elif key in FAULT_TOLERANCE_RETIRED and enable:
            harmless, remedy = FAULT_TOLERANCE_RETIRED[key]
            if type(value) is type(harmless) and value == harmless:
                reader.note(path, "has no effect: it says what happens anyway")
            else:
                reader.problem(path, remedy)
    if enable is False:
        reader.note(here, 'is switched off (enable = false): semi_sync.method = "none" unless it is written')
        if "semi_sync.method" not in reader.layer.values:
            reader.layer.put("semi_sync.method", "none", reader.at((*here, "enable")))
    elif enable:
        _complete(reader, written)


def _complete(reader: Reader, written: dict[str, Any]) -> None:
    """Answer for the keys of an enabled table that were left to v0.2's defaults."""
    here = (*reader.root, SECTION)
    if "semi_sync_method" not in written and "semi_sync.method" not in reader.layer.values:
        reader.layer.put("semi_sync.method", "sync", reader.at(here))
        reader.note(
            here, 'has no semi_sync_method: semi_sync.method = "sync", which averages gradients in every step'
        )
    if "sync_steps" not in written and "semi_sync.sync_every" not in reader.layer.values:
        reader.layer.put("semi_sync.sync_every", _DEFAULT_SYNC_STEPS, reader.at(here))
        reader.note(here, f"leaves sync_steps to its default: semi_sync.sync_every = {_DEFAULT_SYNC_STEPS}")
