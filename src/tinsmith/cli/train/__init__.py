"""`tinsmith train` and `tinsmith demo`: training loops over the public client.

`command` reads the options, `defaults` chooses those not given, and `run` owns one resumable run and its output
directory (`state`). `sft` and `rl` are the loops, written as a user would write them; what `sft` minimizes is one of
`objectives`. Start with `sft`.
"""
