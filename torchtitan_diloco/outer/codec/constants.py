"""Numbers as tensors: an operation with a Python number would allocate one for it at every call."""

import torch


def int32(value: int, device: torch.device) -> torch.Tensor:
    """0-D, for use with int32 tensors only: with others torch would convert it at every call."""
    return torch.tensor(value, dtype=torch.int32, device=device)


def float32(value: float, device: torch.device) -> torch.Tensor:
    """0-D, for use with float32 tensors."""
    return torch.tensor(value, dtype=torch.float32, device=device)
