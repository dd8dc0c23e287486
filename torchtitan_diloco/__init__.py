"""Train one model with TorchTitan across several clusters joined by slow links."""

__version__ = "0.1.0"
