"""Backends for tests of servers and programs: deterministic arithmetic in place of a model, never a default."""
