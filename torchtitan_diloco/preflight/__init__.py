"""What an island can find out before it takes GPUs. Checks are data: rows, each with what was seen and the remedy."""
