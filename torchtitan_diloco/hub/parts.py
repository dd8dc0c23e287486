"""Files of tensors that the hub's manifest names: immutable, one for each version of each part, with a checksum."""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
import xxhash

from torchtitan_diloco.durable import write_whole
from torchtitan_diloco.hub.terms import Terms
from torchtitan_diloco.outer import stream

CHECKSUM = "xxh3_128"


class Parts:
    """In a folder of this machine. An entry of the manifest names a file, with its length and the tensor's checksum."""

    def __init__(self, folder: Path) -> None:
        """Raises OSError."""
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def of(self, terms: Terms) -> None:
        """The parts are those of this run."""

    def read(self, name: str, entry: Mapping[str, Any]) -> torch.Tensor:
        """Raises ValueError naming the file that is missing or damaged."""
        path = self._folder / entry["file"]
        try:
            with open(path, "rb") as file:
                tensor, _ = stream.read(name, iter(lambda: file.read(stream.PIECE), b""))
        except (ValueError, OSError) as error:
            raise ValueError(f"{path} is damaged: {error}") from error
        if checksum(tensor) != entry[CHECKSUM]:
            raise ValueError(f"{path} is damaged: it does not match its checksum")
        return tensor

    def write(self, file: str, name: str, tensor: torch.Tensor) -> dict[str, Any]:
        """It is on the disk when this returns: its entry. Raises OSError."""
        write_whole(self._folder / file, stream.write(name, tensor))
        return {"file": file, "bytes": stream.length(name, tensor), CHECKSUM: checksum(tensor)}

    def remove(self, files: Collection[str]) -> None:
        for file in files:
            (self._folder / file).unlink(missing_ok=True)

    def keep(self, files: Collection[str]) -> None:
        """Remove all others."""
        self.remove([path.name for path in self._folder.iterdir() if path.name not in files])


def checksum(tensor: torch.Tensor) -> str:
    return xxhash.xxh3_128_hexdigest(tensor.numpy().view("uint8").data)


def fragment_of(name: str) -> int:
    """Of a part's name, or of its file's: anchor.3, momentum.3, residual.3[0:10]."""
    digits = name.partition(".")[2]
    return int(digits[: next((i for i, c in enumerate(digits) if not c.isdigit()), len(digits))])
