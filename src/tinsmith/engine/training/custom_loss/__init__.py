"""Losses uploaded by clients: a graph of tensor operations from an allow list, never code.

`checks` validates a graph before anything runs, `operations` is the allow list with a size limit for each result, and
`interpreter` runs a graph datum by datum, within a time limit. Start with `interpreter`.
"""
