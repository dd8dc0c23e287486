"""Comparing two programs on a machine whose speed drifts: the order of turns, and what paired ratios say."""

import argparse
import os
import platform
from collections.abc import Sequence
from pathlib import Path

import numpy as np

WIDEST = 0.05
"""An interval wider than this decides nothing: disturbances come in bursts, which the bootstrap takes for chance."""


def machine() -> str:
    """The hardware, and how busy it is."""
    names = [w for w in Path("/proc/cpuinfo").read_text().splitlines() if w.startswith("model name")]
    model = names[0].split(":")[1].strip() if names else "CPU"
    load = ", ".join(f"{x:.1f}" for x in os.getloadavg())
    return f"{platform.machine()} {model}, {len(os.sched_getaffinity(0))} cores, load average {load}"


def order_of_turns(pairs: int) -> list[tuple[int, int]]:
    """Which side goes first and second in each pair: A B, B A, B A, A B, ... (Thue-Morse, so that drift cancels)."""
    return [(1, 0) if bin(pair).count("1") % 2 else (0, 1) for pair in range(pairs)]


def interval(ratios: Sequence[float], samples: int = 4000) -> tuple[float, float]:
    """95 % bootstrap interval of the median."""
    draws = np.random.default_rng(0).choice(np.array(ratios), (samples, len(ratios)))
    low, high = np.percentile(np.median(draws, axis=1), (2.5, 97.5))
    return float(low), float(high)


def verdict(low: float, high: float, target: float) -> str:
    """What the interval says about the target."""
    if high - low > WIDEST:
        return f"not resolved (the interval is wider than {WIDEST}): the machine is too busy"
    if low >= target:
        return "met"
    return "MISSED" if high < target else "not resolved (the interval holds it): measure for longer"


def require_counts(parser: argparse.ArgumentParser, arguments: argparse.Namespace, *names: str) -> None:
    """End with a usage error where one of these options is below 1."""
    for name in names:
        if getattr(arguments, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1")
