"""Whether there is a CUDA device, asked in another process: ComfyUI has to be imported before torch."""

from __future__ import annotations

import subprocess
import sys


def is_there() -> bool:
    command = [sys.executable, "-c", "import torch; raise SystemExit(not torch.cuda.is_available())"]
    return subprocess.run(command, capture_output=True).returncode == 0
