"""The engine: what computes. The server knows `base` alone; files below this package alone import torch."""
