"""Records a training step as a CUDA graph: a small model spends its time on launching kernels otherwise."""

from __future__ import annotations

from collections.abc import Callable

import torch

# Steps of a size that run as they are before it is recorded, so that libraries have set themselves up.
_WARM = 3

Step = Callable[..., torch.Tensor]


class Recorded:
    """Calls a step, from the fourth time on with inputs of the same shapes by replaying its kernels.

    Args:
        step: works on tensors of a CUDA device alone, waits for nothing, and returns one tensor.
    """

    def __init__(self, step: Step):
        self._step = step
        self._warmed: dict[tuple[torch.Size, ...], int] = {}
        self._graphs: dict[tuple[torch.Size, ...], tuple[torch.cuda.CUDAGraph, list, torch.Tensor]] = {}
        self._pool = None
        self._stream = torch.cuda.Stream()

    def __call__(self, *inputs: torch.Tensor) -> torch.Tensor:
        """Runs the step and returns its result, which stays valid."""
        key = tuple(tensor.shape for tensor in inputs)
        if key not in self._graphs:
            if self._warmed.setdefault(key, 0) < _WARM:
                self._warmed[key] += 1
                return self._beside(inputs)
            self._graphs[key] = self._record(inputs)
        graph, places, result = self._graphs[key]
        for place, tensor in zip(places, inputs, strict=True):
            place.copy_(tensor)
        graph.replay()
        return result.clone()

    def _beside(self, inputs: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """On a stream of its own, as recording does it."""
        current = torch.cuda.current_stream()
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            result = self._step(*inputs)
        current.wait_stream(self._stream)
        return result

    def _record(self, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.cuda.CUDAGraph, list, torch.Tensor]:
        places = [tensor.clone() for tensor in inputs]
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        # The graphs run one after the other, so they may share their memory.
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
            result = self._step(*places)
        self._pool = graph.pool()
        return graph, places, result
