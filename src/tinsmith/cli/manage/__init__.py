"""Commands that look at a server and manage what it holds: keys, models, runs, sessions, status, usage, billing.

Each file is one command. They call the public client and print tables or JSON (`--format`). Start with `run` for a
typical one.
"""
