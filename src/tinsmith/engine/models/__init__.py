"""Base models: configuration, weights, tokenizer, and the decoder that training and sampling share.

`load` reads a model from a Hugging Face directory, a GGUF file or the hub (`sources`), and `decoder` is its forward
pass. What tells one architecture from another is data (`config`), which `families` reads from config.json. `tiny`
writes small random models for tests. Start with `load`.
"""
