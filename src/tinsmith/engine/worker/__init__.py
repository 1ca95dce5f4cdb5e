"""The engine process: `python -m tinsmith.engine.worker.main`.

`main` reads frames from the API process, `scheduler` decides whose job runs next, and `torch_executor` computes it,
a slice at a time, so that nobody waits long. `startup` sets the environment before torch is loaded. Start with
`main`.
"""
