"""Training one adapter: a forward or backward pass over packed datums, losses, gradients, AdamW.

`trainer` runs a request from datums to logprobs, metrics and gradients; `layers` is the hand-written backward pass;
`losses` has one file per loss and `custom_loss` runs losses that clients upload. Start with `trainer`.
"""
