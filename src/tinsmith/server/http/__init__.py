"""From HTTP to calls and back.

`endpoint` is the one door: it authenticates, limits, decodes and counts every request of every route, as the route
table declares it. `errors` maps errors to statuses. `uvicorn_protocol` adds limits on clients to uvicorn.
Start with `endpoint`.
"""
