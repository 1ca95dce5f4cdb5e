"""Checkpoints on disk: an adapter in PEFT's layout, the optimizer's state, and a manifest with digests.

`format` writes and reads them, `durable_files` makes sure that they are on the disk, `peft_import` and `export`
convert from and to the formats of other programs. Start with `format`.
"""
