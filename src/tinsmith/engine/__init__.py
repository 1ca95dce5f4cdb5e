"""The engine: LoRA training and sampling on a base model, in a process of its own.

Jobs go in and results come out through `protocol.Backend`, the only part that the server imports. `backend` runs in
the API process and supervises engine processes; `worker` is the engine process, which schedules jobs and runs them
with `training` and `sampling` on `models`. Start with `protocol`, then `worker/main`.
"""
