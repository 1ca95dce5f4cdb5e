"""The table of endpoints.

`table` has every route of the protocol, `own` the ones that only tinsmith has, `openai` and `anthropic` those of other
services' clients, and `served` all of them; `door` is what each must declare: scope, owner, body limit, cost. Client,
server, reference documentation and tests read the same table.
"""
