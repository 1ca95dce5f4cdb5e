"""Who calls and what they may do: keys, tokens, scopes, ownership, admission and budgets by tenant.

`authenticator` turns a credential into a `Caller`, `access` finds things only for those who may see them, and
`admission` and `budgets` bound what one tenant can hold. Start with `access`.
"""
