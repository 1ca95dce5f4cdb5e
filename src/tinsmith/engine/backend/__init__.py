"""The API process's side of the engine: start engine processes, queue jobs for them, restart them when they die.

`local.LocalBackend` implements `protocol.Backend`; `supervisor` owns one engine process across restarts, and
`suspects` finds out which job kills it. No torch here. Start with `local`.
"""
