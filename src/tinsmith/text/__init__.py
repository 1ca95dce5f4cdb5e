"""Text, for client, server and command line alike: tokenizers, chat templates, and what may be shown in a terminal.

`tokenizer` wraps the `tokenizers` library under the method names that programs expect; `chat_template` renders a
conversation in `template_sandbox`, since templates come from strangers; `printable` makes untrusted text safe to show.
Start with `tokenizer`. The libraries are imported when they are needed (`optional_packages`).
"""
