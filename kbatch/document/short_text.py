"""Texts cut to a length."""


def shortened(text: str, characters: int) -> str:
    """Cuts a text that is too long, and marks the cut.

    Example:

    >>> shortened("learning_rate", 9)
    'learning…'

    Args:
        text: The text.
        characters: How long it may be.
    """
    return text if len(text) <= characters else f"{text[: characters - 1]}…"
