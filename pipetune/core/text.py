"""Text for a terminal: what came from elsewhere, and sizes."""


def printable(text: str) -> str:
    """Without what could steer a terminal: names, messages and files of others may hold escape codes."""
    return "".join(character for character in text if character.isprintable() or character in "\n\t")


def size(count: float) -> str:
    """Bytes as `3 KiB`, `64 MiB`, `23.5 GiB`."""
    for unit, of_unit in (("GiB", 2**30), ("MiB", 2**20)):
        if count >= of_unit:
            return f"{count / of_unit:.3g} {unit}" if count < 1000 * of_unit else f"{count / of_unit:,.0f} {unit}"
    return f"{count / 1024:.3g} KiB"
