"""The protocol: every message, route, encoding and rule, declared once for client, server and engine.

`messages` and `values` are the types, `codecs` their bytes, `routes` the table of endpoints, and `rules` the checks
that all sides apply. `losses` declares every loss, `limits` bounds every string, list and map. Start with
`routes/table`.
"""
