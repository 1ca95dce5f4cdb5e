"""The table of endpoints.

`table` has every route of the protocol and `own` the ones that only tinsmith has; `door` is what each must declare:
scope, owner, body limit, cost. Client, server, reference documentation and tests read the same table.
"""
