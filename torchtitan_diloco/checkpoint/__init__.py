"""Durable state of an island: TorchTitan's checkpoint with the run's outer state beside it."""
