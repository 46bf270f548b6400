"""Where things lie: the repository and the folder with everything that the tools make."""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TOOLS = ROOT / "tools"
TESTS = ROOT / "tests"

DEV = ROOT / ".dev"
VENV = DEV / "venv"
LOGS = DEV / "logs"
REPORTS = DEV / "reports"


def venv_python(venv: Path = VENV) -> Path:
    """The interpreter of a virtual environment on this operating system."""
    return venv / "Scripts" / "python.exe" if os.name == "nt" else venv / "bin" / "python"
