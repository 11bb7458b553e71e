"""Text that came from elsewhere, made fit for a terminal."""


def printable(text: str) -> str:
    """Without what could steer a terminal: names, messages and files of others may hold escape codes."""
    return "".join(character for character in text if character.isprintable() or character in "\n\t")
