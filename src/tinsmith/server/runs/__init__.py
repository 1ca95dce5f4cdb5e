"""Training runs: each one's jobs in order, its state rebuilt when an engine is lost.

`run` is the state machine of one run, `order` its sequence numbers, `replay` recomputes state from the journal and
compares results bit for bit, and `snapshots` keep replays short. Start with `run`.
"""
