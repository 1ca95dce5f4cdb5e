"""The API server: HTTP requests in, durable jobs to a backend, results out.

`app` wires everything and `process` runs it. A request passes `http` (authentication, limits, decoding), a handler
in `routes`, and `jobs`, which journals it before it is answered; `runs` keeps each training run in order and
rebuilds it after a crash. No torch here. Start with `app`, then `jobs/lifecycle`.
"""
