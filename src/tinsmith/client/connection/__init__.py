"""One client's connection to one server: credentials, limits, retries, polling, the session and its end.

`operations` is what the public clients call: submit a request and wait for its result. `connection` sends one
request; `polling` asks until a result is there; `local_engine` starts a server on this machine when no address is
set. Start with `operations`.
"""
