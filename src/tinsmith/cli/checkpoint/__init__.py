"""`tinsmith checkpoint`: list, publish, expire, delete, download, export and import checkpoints.

Each file is one subcommand; `show` defines the group and the short ones. `export` and `import_` load the engine to
convert files; the rest only talks to a server.
"""
