"""Commands that ask a model for text: `chat`, `sample` and `eval`.

`conversation` holds a chat's messages and streams answers; `chat` is its terminal, and `line_editor` reads what is
typed there. Models and checkpoints are opened by `tinsmith.cli.models`.
"""
