"""`tinsmith train` and `tinsmith demo`: training loops over the public client.

`command` reads the options, `run` owns one resumable run and its output directory (`state`), and `sft`, `dpo` and
`rl` are the loops, written as a user would write them. Start with `sft`.
"""
