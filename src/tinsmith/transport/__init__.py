"""HTTP for the client.

`base` is the interface. `pool` is the default transport (HTTP/1.1 over `http_connection` and `http1`), and
`aiohttp_transport` handles what it does not, such as proxies and streams. `retry` has the one retry policy; `gate` has
the circuit breaker and the limit on concurrent requests. Start with `base`.
"""
