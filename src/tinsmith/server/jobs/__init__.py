"""The life of a request: accepted, journalled, run, its result stored, its client answered.

`accept` accepts numbered training requests exactly once; `lifecycle` journals and finishes jobs; `pending_results`
wakes the polls that wait; `on_finished` turns an engine's result into an answer and rows. Start with `lifecycle`.
"""
