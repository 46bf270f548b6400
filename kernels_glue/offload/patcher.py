"""Core's patcher with blocks that are placed and streamed by the pack."""

from __future__ import annotations

import time
import weakref
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import comfy.model_management as management
import comfy.model_patcher
import torch

from ..names import MODEL_PREFIX
from ..report import Report
from . import baking, report
from .config import NODE
from .handle import KEY, NO_LIMIT, Offload, Placed, allowed_bytes, offload_of, placed_on
from .leaves import leaves
from .lists import Found, find_blocks
from .pinning import unlock
from .plan import Sizes
from .slab import Block, slab_bytes
from .streaming import Streaming
from .twins import twin_of

if TYPE_CHECKING:
    from comfy.model_base import BaseModel

# Core's list has (sizes ..., name, module, parameters).
_NAME, _MODULE = -3, -2


class Streams:
    """Laid over ModelPatcher: blocks are placed by a plan, everything else is loaded by core.

    Weights are either where the pack placed them (loaded) or all in host memory, as core has them of a model
    that is not loaded. There is no state between, so that a clone without the node finds what it expects.
    """

    def load(
        self,
        device_to: torch.device | None = None,
        lowvram_model_memory: float = 0,
        force_patch_weights: bool = False,
        full_load: bool = False,
    ) -> None:
        """Core's load: what is outside of the blocks by core, then the blocks by the plan."""
        offload = offload_of(self)
        if offload is None:
            return super().load(device_to, lowvram_model_memory, force_patch_weights, full_load)
        try:
            with self.use_ejected():
                super().load(device_to, NO_LIMIT, force_patch_weights, False)
                found = find_blocks(self.model.diffusion_model)
                outside = _move_rest(self.model, found, device_to)
                allowed = allowed_bytes(lowvram_model_memory, full_load)
                _place(self, offload, found, outside, device_to, allowed)
        except BaseException:
            self.unpatch_model(self.offload_device, unpatch_weights=True)
            raise

    def partially_load(
        self, device_to: torch.device, extra_memory: float = 0, force_patch_weights: bool = False
    ) -> float | None:
        """Core's partially_load; what a clone without the node has loaded goes first."""
        loaded = self.model.model_loaded_weight_memory
        if offload_of(self) is not None and placed_on(self.model) is None and loaded > 0:
            self.unpatch_model(self.offload_device, unpatch_weights=True)
            extra_memory += loaded
        return super().partially_load(device_to, extra_memory, force_patch_weights)

    def is_clone(self, other: Any) -> bool:
        """Core's is_clone, which it asks before it detaches the other one in favour of this one."""
        same, placed = super().is_clone(other), placed_on(self.model)
        if same and placed is not None:
            placed.heir = weakref.ref(self)
        return same

    def clone_has_same_weights(self, *args: Any, **kwargs: Any) -> bool:
        """Core's clone_has_same_weights, which asks is_clone and detaches nothing."""
        same = super().clone_has_same_weights(*args, **kwargs)
        if (placed := placed_on(self.model)) is not None:
            placed.heir = None
        return same

    def _heritage(self) -> tuple[Any, ...]:
        """What has to be the same for one patcher to go on with what another one has placed."""
        return offload_of(self), self.patches_uuid, self.force_cast_weights

    def partially_unload(
        self, device_to: torch.device, memory_to_free: float = 0, force_patch_weights: bool = False
    ) -> float:
        """Core wants memory back: resident blocks become streamed ones. Returns the bytes that are freed."""
        offload, placed = offload_of(self), placed_on(self.model)
        if offload is None:
            return super().partially_unload(device_to, memory_to_free, force_patch_weights)
        if placed is None or not placed.streaming.plan.resident:
            return 0
        before = self.loaded_size()
        sizes = _sizes(placed.outside, placed.streaming, find_blocks(self.model.diffusion_model))
        if (plan := offload.plan_within(sizes, before - memory_to_free)) is None:
            return 0  # core unloads the whole model then
        try:
            self.unpatch_hooks()
            placed.streaming.place(plan, offload.pins_wanted())
            _count(self, placed)
        except BaseException as error:
            self.unpatch_model(self.offload_device, unpatch_weights=True)
            if not isinstance(error, torch.OutOfMemoryError):
                raise
        return before - self.loaded_size()

    def unpatch_model(self, device_to: torch.device | None = None, unpatch_weights: bool = True) -> None:
        """Core's unpatch_model; with the weights, the blocks go back to host memory first."""
        # ComfyUI also unloads outside of the inference mode in which it loaded, and core cannot load
        # quantized tensors again that were moved there.
        with torch.inference_mode():
            if unpatch_weights:
                self.unpatch_hooks()  # they have to go before what they lie upon
            blocks = _put_back(self) if unpatch_weights else ()
            super().unpatch_model(device_to, unpatch_weights)
            for block in blocks:
                block.bind_host()  # moving a quantized tensor to where it is copies its scales

    def detach(self, unpatch_all: bool = True) -> Any:
        """Core's detach. Another clone takes over, or this one goes: only an heir may find placed blocks."""
        offload, placed = offload_of(self), placed_on(self.model)
        mine = placed is not None and placed.owner() in (self, None)
        heir = placed.take_heir() if mine else None
        goes_on = heir is not None and heir._heritage() == self._heritage() and not unpatch_all
        out = super().detach(unpatch_all or (mine and not goes_on))
        # With another LoRA the same application needs the same pages again.
        if unpatch_all or (mine and (heir is None or offload_of(heir) is not offload)):
            if offload is not None:
                offload.pins_of(self.model).release()
            unlock(slab for block in (placed.streaming.blocks if placed else ()) for slab in block.slabs)
        return out

    def __del__(self):
        placed = placed_on(self.model)
        if placed is not None and placed.owner() in (self, None):
            placed.heir = None  # nobody is about to be loaded
        super().__del__()

    def patch_hooks(self, hooks: Any) -> None:
        """Core's patch_hooks, which writes into the weights where they are."""
        if hooks is not None:
            _weights_change(self)
        super().patch_hooks(hooks)

    def unpatch_hooks(self, whitelist_keys_set: set[str] | None = None) -> None:
        """Core's unpatch_hooks, which writes into the weights where they are."""
        if self.hook_backup:
            _weights_change(self)
        super().unpatch_hooks(whitelist_keys_set)

    def _load_list(self, *args: Any, **kwargs: Any) -> list[tuple]:
        """Core's list of the modules that it loads: those outside of the blocks."""
        entries = super()._load_list(*args, **kwargs)
        if offload_of(self) is None:
            return entries
        inside = set(_modules(find_blocks(self.model.diffusion_model)))
        return [entry for entry in entries if entry[_MODULE] not in inside]


def _place(
    patcher: Any, offload: Offload, found: Found, outside: int, device: torch.device, allowed: float
) -> None:
    model, started = patcher.model, time.perf_counter()
    if (placed := placed_on(model)) is not None and not placed.is_of(found):
        _put_back(patcher)  # another clone had other blocks in the places of these
    placed = placed_on(model) or _placed(patcher, offload, found, outside, device)
    model.__dict__[KEY] = placed
    placed.owner, placed.outside = weakref.ref(patcher), outside
    keys = set(_prepare(patcher, found, device))
    streaming, between = placed.streaming, management.throw_exception_if_processing_interrupted
    baking.bake(patcher, streaming.blocks, keys, device, between)
    plan, remarks = offload.plan(_sizes(outside, streaming, found), allowed)
    changes = plan != streaming.plan
    streaming.place(plan, offload.pins_wanted(), between)
    placed.remarks = (*remarks, *offload.check_pinned(streaming))
    _count(patcher, placed)
    if changes:
        seconds = time.perf_counter() - started
        line = report.placed_line(plan, patcher.loaded_size(), streaming.pins.bytes, seconds)
        Report.of(NODE, [line]).log()


def _placed(patcher: Any, offload: Offload, found: Found, outside: int, device: torch.device) -> Placed:
    twin = twin_of(patcher.model)
    blocks = []
    for name, module in found.blocks:
        management.throw_exception_if_processing_interrupted()
        other = None if twin is None else twin.diffusion_model.get_submodule(name)
        blocks.append(Block(MODEL_PREFIX + name, module, other))
    streaming = Streaming(blocks, offload.lane_for(device), offload.pins_of(patcher.model))
    return Placed(streaming, weakref.ref(patcher), outside)


def _sizes(outside: int, streaming: Streaming, found: Found) -> Sizes:
    return Sizes(outside, tuple(block.bytes for block in streaming.blocks), found.aside)


def _prepare(patcher: Any, found: Found, device: torch.device) -> Iterator[str]:
    """Sets core's marks on the modules of the blocks, as its own load does for resident ones.

    Yields the keys of the weights that core would patch.
    """
    inside = set(_modules(found))
    for entry in super(Streams, patcher)._load_list():
        name, module, params = entry[_NAME:]
        if module not in inside:
            continue
        if hasattr(module, "comfy_cast_weights"):
            comfy.model_patcher.wipe_lowvram_weight(module)
            if patcher.force_cast_weights:
                module.prev_comfy_cast_weights = module.comfy_cast_weights
                module.comfy_cast_weights = True
            for part in ("weight", "bias"):
                wrappers = patcher.weight_wrapper_patches.get(f"{name}.{part}")
                if wrappers:
                    getattr(module, f"{part}_function").extend(wrappers)
            comfy.model_patcher.move_weight_functions(module, device)
        module.comfy_force_cast_weights = patcher.force_cast_weights
        module.comfy_patched_weights = True
        yield from (f"{name}.{param}" for param in params)


def _move_rest(model: BaseModel, found: Found, device: torch.device) -> int:
    """Moves what core's list leaves out: parameters and buffers of modules that have submodules.

    Returns the bytes of all that is outside of the blocks.
    """
    rest = list(_outside(model, found))
    for module in rest:
        module._apply(lambda tensor: tensor.to(device), recurse=False)
    return sum(map(_own_bytes, rest))


def _put_back(patcher: Any) -> Sequence[Block]:
    """Puts all blocks back into host memory, and returns them."""
    placed = placed_on(patcher.model)
    if placed is None:
        return ()
    placed.streaming.release()
    baking.restore(patcher, placed.streaming.blocks)
    del patcher.model.__dict__[KEY]
    return placed.streaming.blocks


def _count(patcher: Any, placed: Placed) -> None:
    """Tells core what is on the device."""
    model = patcher.model
    model.model_loaded_weight_memory = placed.outside + placed.streaming.device_bytes
    # Core loads a model again, with what is free then, while parts of it are elsewhere.
    model.model_lowvram = bool(placed.streaming.plan.streamed)
    model.model_offload_buffer_memory = 0


def _weights_change(patcher: Any) -> None:
    placed = placed_on(patcher.model)
    if placed is not None:
        placed.streaming.changed()


def _modules(found: Found) -> Iterator[torch.nn.Module]:
    for _, block in found.blocks:
        yield from block.modules()


def _outside(model: BaseModel, found: Found) -> Iterator[torch.nn.Module]:
    inside = set(_modules(found))
    return (module for module in model.modules() if module not in inside)


def _own_bytes(module: torch.nn.Module) -> int:
    """Bytes of the parameters and buffers that a module has itself."""
    own = (*module.parameters(recurse=False), *module.buffers(recurse=False))
    return sum(leaf.nbytes for tensor in own for leaf in leaves(tensor))


def sizes_of(model: BaseModel) -> Sizes:
    """Bytes of a model's weights, before anything is placed."""
    found = find_blocks(model.diffusion_model)
    outside = sum(map(_own_bytes, _outside(model, found)))
    return Sizes(outside, tuple(slab_bytes(module) for _, module in found.blocks), found.aside)
