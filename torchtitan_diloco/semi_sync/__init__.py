"""Semi-synchronous methods: what an island does beside its inner training. Importing this registers the shipped ones."""

from torchtitan_diloco.semi_sync import diloco, none, sync
from torchtitan_diloco.semi_sync.method import (
    Discarded,
    SemiSync,
    Setup,
    make_method,
    method_class,
    register_semi_sync,
)

__all__ = [
    "Discarded",
    "SemiSync",
    "Setup",
    "diloco",
    "make_method",
    "method_class",
    "none",
    "register_semi_sync",
    "sync",
]
