"""Models that our own decoder does not compute, on the forward pass of transformers: any causal LM that it loads.

A directory with an unknown architecture goes in; what the trainer and the sampler compute with comes out.
`architecture` decides and refuses, `modules` finds the linears that an adapter changes, `model` loads and tries the
model, `training` and `sampling` fit it to the trainer and the sampler. Start with `model`. transformers is imported
only here, inside functions: it is an optional package.
"""
