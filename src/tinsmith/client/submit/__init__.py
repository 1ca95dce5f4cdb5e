"""How operations leave the client.

`in_order` sends one model's operations in call order, split into chunks; `samples_together` and `poll_together` put
many samples into one request where the server can take that; `stream` follows one sample token by token. Start with
`in_order`.
"""
