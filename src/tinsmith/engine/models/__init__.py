"""Models: their shapes, weights and tokenizers, from whatever file they come in."""
