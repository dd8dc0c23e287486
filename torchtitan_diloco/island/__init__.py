"""One island seen from inside: who it is, its parameters as whole named tensors, and how its ranks agree."""
