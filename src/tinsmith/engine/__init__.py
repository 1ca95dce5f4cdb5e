"""The engine: model code, LoRA, losses, optimizer and sampler. Only files below this package import torch."""
