"""Losses written by the user.

`custom_loss` runs a Python loss in the client between a forward and a backward pass; `loss_graph` traces one into a
graph that the server runs; `regularizers` has terms to add to either. Start with `custom_loss`.
"""
