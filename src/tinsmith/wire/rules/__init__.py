"""Rules that several sides apply: written once, read by client, server and engine.

`sample_rules`, `loss_rules` and `adam_rules` say which requests are valid, `split_join` how a call is split into chunks
and its results joined, `faults` which exception a failed answer becomes.
"""
