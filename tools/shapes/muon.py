"""The Muon optimizer for many small matrices of few shapes.

torch.optim.Muon takes one matrix after the other, a thousand small kernels a step, and its learning rate is a
number; this one takes all matrices of a shape at once and reads the rate from a tensor, so that a step can be
recorded as a CUDA graph. The update is the same: https://kellerjordan.github.io/posts/muon, with the learning
rate adjusted to the size of AdamW's updates (arXiv 2502.16982).
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

# Of the quintic iteration that drives the singular values of a matrix towards 1.
_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_ITERATIONS = 5
_RMS = 0.2  # of AdamW's updates


class StackedMuon(torch.optim.Optimizer):
    """Muon over matrices.

    Args:
        parameters: 2D.
        rate: learning rate, a tensor without dimensions that the caller may change between steps.
        momentum: Nesterov's.
        weight_decay: decoupled.
    """

    def __init__(
        self,
        parameters: Iterable[torch.nn.Parameter],
        rate: torch.Tensor,
        momentum: float = 0.95,
        weight_decay: float = 0.1,
    ):
        super().__init__(parameters, dict(lr=rate, momentum=momentum, weight_decay=weight_decay))

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """One update of all matrices from their gradients."""
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[torch.nn.Parameter]] = {}
            for parameter in group["params"]:
                by_shape.setdefault(parameter.shape, []).append(parameter)
            for parameters in by_shape.values():
                self._update(parameters, group["lr"], group["momentum"], group["weight_decay"])

    def _update(
        self, parameters: list[torch.nn.Parameter], rate: torch.Tensor, momentum: float, weight_decay: float
    ) -> None:
        gradients = [parameter.grad for parameter in parameters]
        buffers = [self._buffer(parameter) for parameter in parameters]
        torch._foreach_lerp_(buffers, gradients, 1 - momentum)
        direction = orthogonal(torch.stack(gradients).lerp(torch.stack(buffers), momentum))
        size = _RMS * max(parameters[0].shape) ** 0.5
        for parameter, update in zip(parameters, direction, strict=True):
            parameter.mul_(1 - rate * weight_decay).sub_(update * (rate * size))

    def _buffer(self, parameter: torch.nn.Parameter) -> torch.Tensor:
        state = self.state[parameter]
        if not state:
            state["momentum"] = torch.zeros_like(parameter)
        return state["momentum"]


def orthogonal(matrices: torch.Tensor) -> torch.Tensor:
    """The nearly orthogonal matrices next to [N, rows, columns], by Newton-Schulz (on a GPU in bf16)."""
    a, b, c = _COEFFICIENTS
    tall = matrices.shape[1] > matrices.shape[2]
    x = matrices.mT if tall else matrices
    if x.is_cuda:  # a CPU has no fast bf16
        x = x.bfloat16()
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)
    for _ in range(_ITERATIONS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * (gram @ gram)) @ x
    return (x.mT if tall else x).to(matrices.dtype)
