"""What several test files need to run Layerwise Offload on real ComfyUI objects, with a CPU for a device."""

from __future__ import annotations

from typing import Any

import torch
from comfyui import inprocess
from stand_in_lane import HostLane

NODE_ID = "KitchenLayerwiseOffload"
GIB = 2**30
DITS = ("wan", "h3", "flux")
# Enough blocks that some can be resident and more than the slots are streamed.
DEEP: dict[str, dict[str, int]] = {
    "wan": {"num_layers": 6},
    "h3": {"num_layers": 6},
    "flux": {"depth": 3, "depth_single_blocks": 4},
}


def offload(
    source: Any, *, lanes: list[HostLane] | None = None, late: bool = False, **settings: Any
) -> tuple[Any, str, list[str]]:
    """(model, report, texts shown after sampling), on a CUDA device or the stand-in for one.

    lanes: gets the lane of each load; late: see HostLane. Neither is for CUDA.
    """
    apply = inprocess.pack_module("kernels_glue.offload.apply")
    config = inprocess.pack_module("kernels_glue.offload.config").OffloadConfig(**settings)
    shown: list[str] = []
    made = [] if lanes is None else lanes

    def lane_for(device: torch.device) -> HostLane:
        made.append(HostLane(device, late=late))
        return made[-1]

    stand_in = None if on_gpu() else lane_for
    with torch.inference_mode():
        patcher, report = apply.offload_model(
            source, config, lambda report: shown.append(report.text), stand_in
        )
    return patcher, report.text, shown


def on_gpu() -> bool:
    """Whether ComfyUI computes on a CUDA device."""
    import comfy.model_management

    return comfy.model_management.get_torch_device().type == "cuda"


def unload() -> None:
    """Core's button without the collection of garbage, which takes longer than most tests."""
    import comfy.model_management

    comfy.model_management.unload_all_models()


def sizes(model: Any) -> Any:
    """Bytes of a model's weights, see plan.Sizes."""
    return inprocess.pack_module("kernels_glue.offload.patcher").sizes_of(model.model)


def budget_for(model: Any, resident: int, slots: int = 2) -> float:
    """GiB that hold this many resident blocks, all of one size, and the slots of the others."""
    found = sizes(model)
    return (found.outside + (resident + slots) * max(found.blocks)) / GIB


def placed(model: Any) -> Any:
    """What is placed of a model now, or None."""
    return inprocess.pack_module("kernels_glue.offload.handle").placed_on(model.model)


def bits(model: Any) -> dict[str, torch.Tensor]:
    """Every tensor of a model in host memory, as bytes."""
    leaves = inprocess.pack_module("kernels_glue.offload.leaves").leaves
    module = model.model.diffusion_model
    tensors = dict((*module.named_parameters(), *module.named_buffers()))
    found = {}
    for name, tensor in tensors.items():
        for index, leaf in enumerate(leaves(tensor)):
            found[f"{name}:{index}"] = leaf.cpu().contiguous().reshape(-1).view(torch.uint8).clone()
    return found


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    """Whether two results of `bits` are equal."""
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def in_host_memory(block: Any) -> bool:
    """Whether all weights of a streamed block lie in the slabs that it is copied from."""
    leaves = inprocess.pack_module("kernels_glue.offload.leaves").leaves
    spans = [(slab.data_ptr(), slab.data_ptr() + slab.nbytes) for slab in block.slabs]
    places = [leaf.data_ptr() for part in block.parts for leaf in leaves(part.tensor)]
    return all(any(start <= place < end for start, end in spans) for place in places)
