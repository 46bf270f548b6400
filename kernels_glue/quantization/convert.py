"""Turns weights into INT8 ConvRot, a few rows at a time, on the CPU or through a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from comfy_kitchen.tensor import QuantizedTensor

from .gpu_stream import GpuStream

LAYOUT = "TensorWiseINT8Layout"

# Rows are independent of each other (one scale a row, rotation along the inputs), so the result does
# not depend on this size; it bounds the memory that a layer needs beside its weight and its result.
CHUNK_BYTES = 64 * 2**20


@dataclass(frozen=True)
class Job:
    """One layer to quantize.

    Attributes:
        name: dotted name below the diffusion model.
        group_size: ConvRot group size; divides K.
        load: returns the weight [N, K] in any floating dtype, on the CPU or on the GPU.
        dtype: what the GPU upcasts fp8 weights to first; comfy_kitchen quantizes fp32, fp16 and bf16.
    """

    name: str
    group_size: int
    load: Callable[[], torch.Tensor]
    dtype: torch.dtype


@dataclass(frozen=True)
class Int8Weight:
    """A quantized weight in host memory: int8 [N, K] and one fp32 scale a row [N, 1]."""

    data: torch.Tensor
    scale: torch.Tensor
    group_size: int


def quantize_rows(weight: torch.Tensor, group_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantizes a weight [N, K] on its device; returns int8 [N, K] and fp32 scales [N, 1]."""
    quantized = QuantizedTensor.from_float(
        weight, LAYOUT, per_channel=True, convrot=True, convrot_groupsize=group_size
    )
    return quantized._qdata, quantized._params.scale


def quantize_jobs(
    jobs: Iterable[Job], device: torch.device, on_layer: Callable[[], None]
) -> dict[str, Int8Weight]:
    """Quantizes all jobs, in order, one layer at a time.

    Args:
        device: a CUDA device to stream through, or the CPU.
        on_layer: called before each layer; what it raises ends the work and leaves nothing behind.
    """
    if device.type != "cuda":
        return {job.name: _quantize_on_cpu(job) for job in _announced(jobs, on_layer)}
    results = {}
    with GpuStream(device, CHUNK_BYTES) as stream:
        for job in _announced(jobs, on_layer):
            weight = job.load()
            result = _empty_result(weight, job)
            for rows in _row_slices(weight):
                stream.submit(
                    weight[rows],
                    lambda chunk, job=job: quantize_rows(_upcast(chunk, job.dtype), job.group_size),
                    (result.data[rows], result.scale[rows]),
                )
            results[job.name] = result
    return results


def _announced(jobs: Iterable[Job], on_layer: Callable[[], None]) -> Iterator[Job]:
    for job in jobs:
        on_layer()
        yield job


def _quantize_on_cpu(job: Job) -> Int8Weight:
    weight = job.load()
    result = _empty_result(weight, job)
    for rows in _row_slices(weight):
        # The reference kernel computes in the dtype of its input: in bf16 that costs 8% more error.
        data, scale = quantize_rows(weight[rows].to("cpu", torch.float32), job.group_size)
        result.data[rows].copy_(data)
        result.scale[rows].copy_(scale)
    return result


def _empty_result(weight: torch.Tensor, job: Job) -> Int8Weight:
    rows, columns = weight.shape
    data = torch.empty((rows, columns), dtype=torch.int8)
    return Int8Weight(data, torch.empty((rows, 1), dtype=torch.float32), job.group_size)


def _row_slices(weight: torch.Tensor) -> Iterator[slice]:
    rows, columns = weight.shape
    step = max(1, CHUNK_BYTES // (columns * weight.element_size()))
    return (slice(start, min(start + step, rows)) for start in range(0, rows, step))


def _upcast(weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return weight.to(dtype) if weight.element_size() == 1 else weight
