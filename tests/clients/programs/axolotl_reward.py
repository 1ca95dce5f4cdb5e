"""A reward for axolotl's reinforcement learning: the share of a completion that are lower case letters."""


def letters(prompts: list[str], completions: list[str]) -> list[float]:
    return [sum("a" <= letter <= "z" for letter in text) / max(len(text), 1) for text in completions]
