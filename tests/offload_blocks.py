"""What tests of streaming share: a model of small blocks, and what it computes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from comfyui import inprocess
from offload_modules import Scale
from stand_in_lane import HostLane

plans = inprocess.pack_module("kernels_glue.offload.plan")
slabs = inprocess.pack_module("kernels_glue.offload.slab")
streaming = inprocess.pack_module("kernels_glue.offload.streaming")
Pins = inprocess.pack_module("kernels_glue.offload.pinning").Pins

COUNT = 7


@dataclass
class Model:
    """Blocks of Scale one after another, streamed through a lane."""

    lane: HostLane
    blocks: torch.nn.ModuleList
    streaming: Any

    def __call__(self, order: list[int] | None = None) -> torch.Tensor:
        """The output for a one; every block saw its own weights."""
        x = torch.ones(300)
        with torch.inference_mode():
            for i in range(len(self.blocks)) if order is None else order:
                x = self.blocks[i](x)
                assert self.blocks[i].seen.pop().tolist() == [1.0 + i] * 300
        return x

    def place(self, resident: int, prefetch: int = 1, pin: bool = False, **more: Any) -> Any:
        sizes = plans.Sizes(0, tuple(block.bytes for block in self.streaming.blocks))
        plan = plans.make_plan(sizes, float("inf"), plans.Wishes(resident, prefetch))
        self.streaming.place(plan, pin, **more)
        return plan

    def check_home(self, indices: Iterable[int] | None = None) -> None:
        """These blocks have their own weights in their own slab of host memory."""
        for i in range(len(self.blocks)) if indices is None else indices:
            block = self.streaming.blocks[i]
            assert block.module.weight.data_ptr() == block.host.data_ptr(), i
            assert block.module.weight.tolist() == [1.0 + i] * 300
            assert block.module.bias.tolist() == [0.5 * i] * 300


def build(
    lane: HostLane | None = None, count: int = COUNT, blocks: list[torch.nn.Module] | None = None
) -> Model:
    lane = lane or HostLane()
    found = torch.nn.ModuleList(blocks or [Scale(i) for i in range(count)])
    made = [slabs.Block(f"blocks.{i}", block) for i, block in enumerate(found)]
    return Model(lane, found, streaming.Streaming(made, lane, Pins(0)))


def right(order: list[int] | None = None) -> torch.Tensor:
    x = torch.ones(300)
    for i in range(COUNT) if order is None else order:
        x = x * (1.0 + i) + 0.5 * i
    return x
