"""Throughput of ``data prepare`` against the tokenizers library's own parallel tokenising, and memory at two sizes.

    python benchmarks/data_prepare.py --megabytes 1000

Text is the bundled one, over and over, each chapter with other numbers in it so that nothing is cached. The library encodes
the same documents from memory with all its threads (reading not timed, ids left where they are), before and after each
preparation: of a quarter, ``--rounds`` times, and of the whole. These count from the command to the finished corpus, and are
compared with the library just before and after. On a machine that others use as well, the ratio of processor seconds per
megabyte says more than that of wall time, and ``cores_used`` how much of it each got. Prints one JSON object.
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


def cpu_seconds() -> float:
    """Of this process and the children it has waited for."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in used)


def library(path: Path, megabytes: float) -> dict[str, float]:
    """The library alone over the first ``megabytes``."""
    os.environ["TOKENIZERS_PARALLELISM"] = "true"
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(Path(assets.resolve(TOKENIZER)) / "tokenizer.json"))
    tokenizer.encode_batch_fast(["warm up"] * 64)
    with open(path, encoding="utf-8") as file:
        text = file.read(int(megabytes * 1e6))
    documents, size = text.split("\n\n"), len(text.encode())
    began, used = time.monotonic(), cpu_seconds()
    for first in range(0, len(documents), 4096):
        tokenizer.encode_batch_fast(documents[first : first + 4096])
    seconds, cpu = time.monotonic() - began, cpu_seconds() - used
    return {"mb_per_s": size / 1e6 / seconds, "cpu_s_per_mb": cpu / (size / 1e6), "cores_used": cpu / seconds}


def preparation(path: Path, output: Path) -> dict[str, float]:
    from torchtitan_diloco.data.prepare import prepare

    began, used = time.monotonic(), cpu_seconds()
    manifest = prepare([path], TOKENIZER, SEQ_LEN, output)
    seconds, cpu = time.monotonic() - began, cpu_seconds() - used
    megabytes = path.stat().st_size / 1e6
    peak = {
        "parent_peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3,
        "worker_peak_mb": resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1e3,
    }
    return {
        "mb_per_s": megabytes / seconds,
        "cpu_s_per_mb": cpu / megabytes,
        "cores_used": cpu / seconds,
        "tokens": manifest.counts.tokens,
        **peak,
    }


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


def rounded(figures: dict[str, float]) -> dict[str, float]:
    return {name: round(value, 3) for name, value in figures.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=float, default=1000)
    parser.add_argument("--library-megabytes", type=float, default=100, help="sample for each of its runs")
    parser.add_argument("--rounds", type=int, default=1, help="preparations of a quarter")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="data-prepare-"))
    try:
        small, large = folder / "small.txt", folder / "large.txt"
        make_text(small, options.megabytes / 4)
        make_text(large, options.megabytes)
        sample = min(options.library_megabytes, options.megabytes)
        alone, prepared = [apart(library, large, sample)], []
        for number, path in enumerate([*[small] * options.rounds, large]):
            prepared.append(apart(preparation, path, folder / f"corpus-{number}"))
            shutil.rmtree(folder / f"corpus-{number}")
            alone.append(apart(library, large, sample))
    finally:
        shutil.rmtree(folder)
    around = list(zip(prepared, alone[:-1], alone[1:], strict=True))
    figures = {
        "cores": len(os.sched_getaffinity(0)),
        "megabytes": options.megabytes,
        "library": [rounded(run) for run in alone],
        "quarter": [rounded(run) for run in prepared[:-1]],
        "whole": rounded(prepared[-1]),
        "ratios_wall": [
            round(2 * run["mb_per_s"] / (before["mb_per_s"] + after["mb_per_s"]), 3)
            for run, before, after in around
        ],
        "ratios_cpu": [
            round((before["cpu_s_per_mb"] + after["cpu_s_per_mb"]) / (2 * run["cpu_s_per_mb"]), 3)
            for run, before, after in around
        ],
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
