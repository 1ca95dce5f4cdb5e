"""What every operation of the SDK runs on: one event loop thread per client, futures, deadlines, metrics.

Nothing here knows about HTTP or the protocol. Start with `futures`, then `runner`.
"""
