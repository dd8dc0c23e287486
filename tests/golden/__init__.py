"""Golden comparison: runs of ours against a NumPy reference that shares no code with them."""
