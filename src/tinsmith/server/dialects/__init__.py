"""Dialects of other services' clients: their requests become samples of the protocol, and samples become their answers.

A dialect translates and decides nothing: `bodies/read_openai` turns a body into samples, `jobs/accept_sample` accepts
them like any others, and here their tokens become text (`text_stream`), messages (`chat_parts`) and OpenAI's objects
(`openai_answer`). `targets` says what a model's name stands for, `caller_session` in whose session it is sampled.
Start with `openai_answer`.
"""
