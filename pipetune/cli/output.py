"""What programs get: one JSON object on standard output."""

import json
import sys
from typing import Any


def print_object(content: dict[str, Any]) -> None:
    """Print it, indented, with an end of line."""
    json.dump(content, sys.stdout, indent=2)
    print()
