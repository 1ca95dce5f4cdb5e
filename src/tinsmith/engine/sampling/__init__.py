"""Sampling with continuous batching and a key/value cache in blocks.

`sampler` admits sequences, runs one step for all of them and draws the next tokens; `plan` is what a request asks
for, `sequence` one running sample, `kv_cache` and `cache_room` the memory. A sample's tokens do not depend on what
runs beside it. Start with `sampler`.
"""
