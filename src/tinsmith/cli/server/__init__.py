"""Commands for the operator of a server: `serve`, `key` and `doctor`.

They work on this machine: on its settings, its data directory and its database. They are the only commands that load
the server or the engine, and they do so when they are called.
"""
