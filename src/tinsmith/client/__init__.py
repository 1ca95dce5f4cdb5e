"""The SDK: what `import tinsmith` offers to programs.

A call goes in on any thread and comes out as a future. `service` makes the other clients; `training` and `sampling`
are the ones that programs use most. Below them, `submit` puts operations in order and on the wire, `connection`
sends, polls and retries, and `runtime` has the event loop and the futures. Start with `service`, then `training`.
"""
