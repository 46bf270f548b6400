"""Runs a function on the GPU over host tensors that do not fit, with copies in flight beside it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import cycle

import comfy.model_management
import torch

Function = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]

# While one slot is being filled by the host, one computes and one drains.
_SLOTS = 3


class GpuStream:
    """A ring of staging buffers: host -> pinned -> GPU -> function -> pinned -> host.

    Plain copies from and to pageable memory stop the host and run at a fraction of the bus; the
    staging buffers are pinned, so that copies in, compute and copies out overlap, and the host's own
    copies into and out of the staging buffers are spread over the CPU's cores.

    Args:
        device: CUDA device.
        chunk_bytes: upper limit of one submitted chunk; a larger chunk grows its slot.
    """

    def __init__(self, device: torch.device, chunk_bytes: int):
        self._device = device
        self._copy_in = torch.cuda.Stream(device)
        self._copy_out = torch.cuda.Stream(device)
        self._chunk_bytes = chunk_bytes
        self._slots: list[_Slot] = []

    def __enter__(self) -> GpuStream:
        try:
            for _ in range(_SLOTS):
                self._slots.append(_Slot(self._device, self._chunk_bytes))
        except BaseException:
            self._release()
            raise
        # The slots' GPU buffers were allocated on the compute stream.
        self._copy_in.wait_stream(torch.cuda.current_stream(self._device))
        self._ring = cycle(self._slots)
        return self

    def __exit__(self, error_type: type | None, *_: object) -> None:
        try:
            for slot in self._in_order():
                if error_type is None:
                    slot.drain()
            torch.cuda.synchronize(self._device)
        finally:
            self._release()

    def submit(self, chunk: torch.Tensor, function: Function, results: Sequence[torch.Tensor]) -> None:
        """Queues `results[i].copy_(function(chunk)[i])`; complete once the stream is left.

        Args:
            chunk: [rows, K], host or GPU; contiguous.
            function: runs on the GPU copy of the chunk, on the current stream.
            results: host tensors of the shapes and dtypes that the function returns.
        """
        slot = next(self._ring)
        slot.drain()
        compute = torch.cuda.current_stream(self._device)
        outputs = function(slot.upload(chunk, self._copy_in, compute))
        slot.download(outputs, results, self._copy_out, compute)

    def _in_order(self) -> list[_Slot]:
        return [next(self._ring) for _ in self._slots]

    def _release(self) -> None:
        for slot in self._slots:
            slot.release()


class _Slot:
    """One place in the ring. A drained slot is free: everything queued through it has finished."""

    def __init__(self, device: torch.device, chunk_bytes: int):
        self._device = device
        # The GPU first: if it is full, nothing has been pinned yet.
        self._gpu = torch.empty(chunk_bytes, dtype=torch.uint8, device=device)
        self._host = _PinnedBytes(chunk_bytes)
        self._outputs: list[_PinnedBytes] = [_PinnedBytes(0), _PinnedBytes(0)]
        self._done = torch.cuda.Event()
        self._pending: list[tuple[torch.Tensor, torch.Tensor]] = []

    def upload(
        self, chunk: torch.Tensor, copy_in: torch.cuda.Stream, compute: torch.cuda.Stream
    ) -> torch.Tensor:
        if chunk.device.type == "cuda":
            return chunk
        staged = self._host.view(chunk.shape, chunk.dtype)
        staged.copy_(chunk)
        if chunk.nbytes > self._gpu.nbytes:
            self._gpu = torch.empty(chunk.nbytes, dtype=torch.uint8, device=self._device)
            copy_in.wait_stream(compute)
        on_gpu = self._gpu[: chunk.nbytes].view(chunk.dtype).view(chunk.shape)
        with torch.cuda.stream(copy_in):
            on_gpu.copy_(staged, non_blocking=True)
        compute.wait_stream(copy_in)
        return on_gpu

    def download(
        self,
        outputs: Sequence[torch.Tensor],
        results: Sequence[torch.Tensor],
        copy_out: torch.cuda.Stream,
        compute: torch.cuda.Stream,
    ) -> None:
        copy_out.wait_stream(compute)
        with torch.cuda.stream(copy_out):
            for buffer, output, result in zip(self._outputs, outputs, results, strict=True):
                staged = buffer.view(output.shape, output.dtype)
                staged.copy_(output, non_blocking=True)
                output.record_stream(copy_out)
                self._pending.append((result, staged))
            self._done.record(copy_out)

    def drain(self) -> None:
        if self._pending:
            self._done.synchronize()
            for result, staged in self._pending:
                result.copy_(staged)
            self._pending.clear()

    def release(self) -> None:
        self._pending.clear()
        for buffer in (self._host, *self._outputs):
            buffer.release()


class _PinnedBytes:
    """A host buffer that is pinned through ComfyUI, which keeps the count; it grows when needed.

    Where pinning is refused the buffer is pageable: slower, and as correct.
    """

    def __init__(self, size: int):
        self._data = torch.nn.Parameter(torch.empty(0, dtype=torch.uint8), requires_grad=False)
        self._pinned = False
        if size:
            self._allocate(size)

    def view(self, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        size = shape.numel() * dtype.itemsize
        if size > self._data.nbytes:
            self.release()
            self._allocate(size)
        return self._data.detach()[:size].view(dtype).view(shape)

    def release(self) -> None:
        if self._pinned:
            comfy.model_management.unpin_memory(self._data)
            self._pinned = False

    def _allocate(self, size: int) -> None:
        self._data = torch.nn.Parameter(torch.empty(size, dtype=torch.uint8), requires_grad=False)
        self._pinned = bool(comfy.model_management.pin_memory(self._data))
