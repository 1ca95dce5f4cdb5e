"""The engine: what computes. The server knows `base` alone."""
