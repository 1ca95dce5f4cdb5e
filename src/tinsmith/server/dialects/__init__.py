"""Dialects of other services' clients: their requests become samples of the protocol, and samples become their answers.

A dialect translates and decides nothing: `bodies/read_openai` and `read_anthropic` turn a body into samples,
`running_samples` has them accepted like any others, and their tokens become text (`text_stream`), parts of a message
(`chat_parts`), and OpenAI's or Anthropic's objects (`openai_answer`, `anthropic_answer`). `targets` says what a model's
name stands for, `caller_session` in whose session it is sampled. Start with `running_samples`.
"""
