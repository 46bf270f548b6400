"""Commands that messages tell the user to run."""

from __future__ import annotations

import sys


def pip(arguments: str) -> str:
    """The command line that runs pip for this interpreter."""
    return f'"{sys.executable}" -m pip {arguments}'
