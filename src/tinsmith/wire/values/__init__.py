"""Values inside messages: tensors, token chunks, model inputs, numbers.

They hold numpy arrays, are immutable, and are compared and checked by content. Start with `tensors`.
"""
