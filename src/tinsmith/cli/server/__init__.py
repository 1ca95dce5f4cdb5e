"""Commands for the machine that a server or the local engine runs on: `serve`, `key`, `stop`, `clean` and `doctor`.

They work on its settings, its data directory and its database, and load the server or the engine when they are called.
`storage` measures what is stored there. Start with `serve`.
"""
