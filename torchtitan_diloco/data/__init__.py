"""Prepared corpora (tokenised, packed, memory-mapped) and the order in which islands read them."""
