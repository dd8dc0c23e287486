"""Semi-synchronous methods: what an island does beside its inner training. Importing this registers the shipped ones."""

from torchtitan_diloco.semi_sync import diloco, none
from torchtitan_diloco.semi_sync.method import SemiSync, Setup, make_method, method_class, register_semi_sync

__all__ = ["SemiSync", "Setup", "diloco", "make_method", "method_class", "none", "register_semi_sync"]
