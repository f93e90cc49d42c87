"""A reward function that tests import by its path."""


def colours(prompts, completions, colour, **columns):
    return [len(value) for value in colour]
