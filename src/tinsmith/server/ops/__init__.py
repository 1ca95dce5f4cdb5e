"""Running the server: expiry (`sweeper`), metrics, usage and its sums, traces, the clock, what ties it to its data.

Nothing here is on the path of a request, except for the counters. Start with `sweeper`.
"""
