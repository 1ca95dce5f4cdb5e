"""A model's tokenizer for the client.

`find` decides where it comes from: the server, a directory, or the hub. What a tokenizer is, and how chat templates
are rendered, is in `tinsmith.text`.
"""
