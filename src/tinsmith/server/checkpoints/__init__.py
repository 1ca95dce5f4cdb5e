"""Checkpoint files as the server handles them: import, upload in parts, digests, retention, disk budgets.

File names come from a fixed set and digests are computed here, never taken from a client. Work that depends on the
size of files runs in `file_work`, off the event loop. Start with `manifest`.
"""
