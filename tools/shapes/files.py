"""What the training writes: the model file as ComfyUI loads it, checkpoints, the loss curve."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch


def write_model(path: Path, model: torch.nn.Module, metadata: Mapping[str, str]) -> None:
    """Writes the weights as a bf16 safetensors file that Load Diffusion Model detects as Wan."""
    from safetensors.torch import save_file

    weights = {
        name: tensor.detach().to("cpu", torch.bfloat16).contiguous()
        for name, tensor in model.state_dict().items()
    }
    _atomically(path, lambda part: save_file(weights, str(part), metadata=dict(metadata)))


def write_checkpoint(path: Path, state: Mapping[str, Any]) -> None:
    """Writes what `read_checkpoint` reads; a stop while writing leaves the previous one."""
    _atomically(path, lambda part: torch.save(dict(state), part))


def read_checkpoint(path: Path) -> dict[str, Any]:
    """The state of a training. Raises ValueError if the file holds none, FileNotFoundError without one."""
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise FileNotFoundError(f"there is no checkpoint {path}") from None
    except Exception as error:
        raise ValueError(f"{path} is no checkpoint of this training: {error}") from error
    if not isinstance(state, dict) or not {"settings", "step", "weights", "optimizers"} <= set(state):
        raise ValueError(f"{path} is no checkpoint of this training")
    return state


def write_losses(path: Path, losses: torch.Tensor) -> None:
    """A CSV with the loss of every step, from step 1."""
    lines = ["step,loss", *(f"{step},{loss:.6f}" for step, loss in enumerate(losses.tolist(), start=1))]
    _atomically(path, lambda part: part.write_text("\n".join(lines) + "\n", encoding="utf-8"))


def _atomically(path: Path, write: Callable[[Path], object]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    write(part)
    os.replace(part, path)
