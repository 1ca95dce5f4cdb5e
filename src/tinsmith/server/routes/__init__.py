"""The handlers, one file per group of routes.

A handler gets a checked `Call`, uses the domain modules, and returns an answer. The table of routes is in
`tinsmith.wire.routes`; `own` has the endpoints that the protocol does not have.
"""
