"""Throughput of ``data prepare`` against the tokenizers library's own parallel tokenising, and memory at two sizes.

    python benchmarks/data_prepare.py --megabytes 1000

Text is the bundled one, over and over, each verse with another number in it so that nothing is cached. The library encodes the
same documents from memory with all its threads (reading not timed, ids left where they are), before and after the
preparation; the preparation counts from the command to the finished corpus. Prints one JSON object.
"""

import argparse
import gzip
import json
import multiprocessing
import os
import resource
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torchtitan_diloco import assets

TOKENIZER = "bundled:bpe2048"
SEQ_LEN = 2048


def make_text(path: Path, megabytes: float) -> None:
    source = assets.resolve("bundled:kjv")
    with gzip.open(source, "rt", encoding="utf-8") as file:
        documents = file.read().split("\n\n")
    number = 0
    with open(path, "w", encoding="utf-8") as out:
        while out.tell() < megabytes * 1e6:
            for document in documents:
                number += 1
                out.write(f"{number} {document.replace(' and ', f' and {number % 9973} ', 1)}\n\n")
                if number % 1000 == 0 and out.tell() >= megabytes * 1e6:
                    return


def library(path: Path, megabytes: float) -> float:
    """MB/s of the library alone over the first ``megabytes``."""
    os.environ["TOKENIZERS_PARALLELISM"] = "true"
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(Path(assets.resolve(TOKENIZER)) / "tokenizer.json"))
    tokenizer.encode_batch_fast(["warm up"] * 64)
    with open(path, encoding="utf-8") as file:
        text = file.read(int(megabytes * 1e6))
    documents, size = text.split("\n\n"), len(text.encode())
    began = time.monotonic()
    for first in range(0, len(documents), 4096):
        tokenizer.encode_batch_fast(documents[first : first + 4096])
    return size / 1e6 / (time.monotonic() - began)


def preparation(path: Path, output: Path) -> dict[str, float]:
    from torchtitan_diloco.data.prepare import prepare

    began = time.monotonic()
    manifest = prepare([path], TOKENIZER, SEQ_LEN, output)
    seconds = time.monotonic() - began
    peak = {
        "parent_peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3,
        "worker_peak_mb": resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1e3,
    }
    return {"mb_per_s": path.stat().st_size / 1e6 / seconds, "tokens": manifest.counts.tokens, **peak}


def apart(call: Callable[..., Any], *arguments: Any) -> Any:
    """The result of a call in a process of its own, so that memory and threads are its own."""
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=_send, args=(sender, call, *arguments))
    child.start()
    sender.close()
    result = receiver.recv()
    child.join()
    return result


def _send(sender: Any, call: Callable[..., Any], *arguments: Any) -> None:
    sender.send(call(*arguments))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=float, default=1000)
    parser.add_argument(
        "--library-megabytes", type=float, default=100, help="sample for each of its two runs"
    )
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="data-prepare-"))
    try:
        small, large = folder / "small.txt", folder / "large.txt"
        make_text(small, options.megabytes / 4)
        make_text(large, options.megabytes)
        sample = min(options.library_megabytes, options.megabytes)
        before = apart(library, large, sample)
        quarter = apart(preparation, small, folder / "small")
        whole = apart(preparation, large, folder / "large")
        after = apart(library, large, sample)
    finally:
        shutil.rmtree(folder)
    rate = (before + after) / 2
    print(
        json.dumps(
            {
                "cores": len(os.sched_getaffinity(0)),
                "megabytes": options.megabytes,
                "library_mb_per_s": [round(before, 2), round(after, 2)],
                "quarter": {k: round(v, 2) for k, v in quarter.items()},
                "whole": {k: round(v, 2) for k, v in whole.items()},
                "ratio": round(whole["mb_per_s"] / rate, 3),
            }
        )
    )


if __name__ == "__main__":
    main()
