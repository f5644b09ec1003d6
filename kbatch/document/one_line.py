"""A message on one line."""


def one_line(text: str, most_characters: int = 300) -> str:
    """Brings a message on one line and shortens what is too long to read."""
    words = " ".join(text.split())
    return words if len(words) <= most_characters else f"{words[: most_characters - 1]}…"
