"""The `tinsmith` command.

`main` lists the commands and loads a command's module when it is called, so `tinsmith --help` imports neither torch
nor an HTTP library. Commands live in folders by what they are for: `train`, `talk`, `checkpoint`, `manage`,
`server`. The files at this level are shared by all of them: connecting, printing, reading data sets. Start with
`main`.
"""
