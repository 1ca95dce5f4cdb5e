"""A deterministic backend without torch, for tests of servers and clients.

`backend.MemoryBackend` implements `engine.protocol.Backend` with simple arithmetic instead of a language model: fast,
exact, and the same on every machine. `arithmetic` defines the model, `engine` runs jobs on it. Start with `backend`.
"""
