"""Tokenizers and chat templates.

`find` decides where a model's tokenizer comes from (the server, a directory, the hub); `tokenizer` wraps the
`tokenizers` library under the method names that programs expect; `chat_template` renders a conversation in a
sandbox, since templates come from strangers.
"""
