"""Whether there is a CUDA device, asked in another process: ComfyUI has to be imported before torch."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path


def is_there(python: Path | str = sys.executable, variables: Mapping[str, str] | None = None) -> bool:
    """Asks a Python's torch; `variables`: its whole environment, None for that of this process."""
    command = [str(python), "-c", "import torch; raise SystemExit(not torch.cuda.is_available())"]
    return subprocess.run(command, env=variables, capture_output=True).returncode == 0
