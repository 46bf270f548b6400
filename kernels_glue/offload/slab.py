"""One contiguous piece of memory a block, and the block's parameters and buffers as views of it."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from dataclasses import dataclass

import numpy
import torch

from .leaves import leaves, rebuilt

# Kernels want 16 bytes; 256 is what torch's own GPU allocations have.
_ALIGNMENT = 256
# Memory is page-locked by whole pages, which no two slabs may share.
PAGE = 4096


@dataclass(frozen=True)
class Leaf:
    """Place and form of one plain tensor in a slab.

    Attributes:
        offset: bytes from the start.
        size, stride: as in torch, in elements.
    """

    offset: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]

    def view(self, slab: torch.Tensor) -> torch.Tensor:
        """The tensor in a slab: uint8 [bytes], on any device."""
        return slab[self.offset :].view(self.dtype).as_strided(self.size, self.stride)

    def lies_in(self, tensor: torch.Tensor, base: int) -> bool:
        """Whether a tensor is this leaf of a slab on the CPU that begins at an address."""
        return tensor.numel() == 0 or (
            tensor.device.type == "cpu"
            and tensor.data_ptr() == base + self.offset
            and (tensor.dtype, tuple(tensor.shape), tensor.stride()) == (self.dtype, self.size, self.stride)
        )


@dataclass(frozen=True)
class Part:
    """One parameter or buffer of a block.

    Attributes:
        table: the dict of the module that owns it, `_parameters` or `_buffers`.
        key: its full name in the model's state dict.
    """

    table: dict[str, torch.Tensor]
    name: str
    key: str
    leaves: tuple[Leaf, ...]

    @property
    def tensor(self) -> torch.Tensor:
        """What the module has now."""
        return self.table[self.name]

    def on(self, slab: torch.Tensor) -> torch.Tensor:
        """The parameter or buffer as a view of a slab."""
        now = self.tensor
        view = rebuilt(now, [leaf.view(slab) for leaf in self.leaves])
        return torch.nn.Parameter(view, requires_grad=False) if isinstance(now, torch.nn.Parameter) else view


class Block:
    """A block of a DiT whose weights lie in one slab of host memory.

    The first time, its weights are moved into a new slab: the module, and whoever else shares it, holds
    views of the slab from then on, and the memory where they lay before is free.

    Args:
        name: of the module in the model, such as `diffusion_model.blocks.0`.
        twin: the same block of another model, whose weights that lie in the same memory move along.
    """

    def __init__(self, name: str, module: torch.nn.Module, twin: torch.nn.Module | None = None):
        self.name = name
        self.module = module
        self.parts, self.bytes = _layout(name, module)
        self._places = [(part.table, part.name) for part in self.parts]
        self._bound: dict[int, list[torch.Tensor]] = {}
        # As in a node: core cannot move quantized tensors that are half made in this mode and half not.
        with torch.inference_mode():
            self._settle(twin)
        self.bind(self.host)

    def _settle(self, twin: torch.nn.Module | None) -> None:
        self.host = _slab_of(self.parts, self.bytes)
        if self.host is None:
            shared = _shared(self.parts, self.name, twin)
            self.host = _moved(self.parts, self.bytes)
            for part, table in shared:
                table[part.name] = _with_notes(part.on(self.host), table[part.name])

    def bind(self, slab: torch.Tensor) -> None:
        """Makes the module's weights views of a slab that has the block's bytes, on any device."""
        views = self._bound.get(slab.data_ptr())
        if views is None:
            with torch.inference_mode():
                views = self._bound[slab.data_ptr()] = [part.on(slab) for part in self.parts]
        for (table, name), view in zip(self._places, views, strict=True):
            table[name] = view

    def forget(self) -> None:
        """Drops the views of device slabs, which would keep these alive."""
        host = self.host.data_ptr()
        self._bound = {address: views for address, views in self._bound.items() if address == host}


def slab_bytes(module: torch.nn.Module) -> int:
    """Bytes of the slab that a block needs."""
    return _layout("", module)[1]


def _layout(name: str, module: torch.nn.Module) -> tuple[tuple[Part, ...], int]:
    parts, offset = [], 0
    for table, short, key, tensor in _tensors(name, module):
        places = []
        for leaf in leaves(tensor):
            stride = leaf.stride() if _is_dense(leaf) else _contiguous(leaf.shape)
            places.append(Leaf(offset, leaf.dtype, tuple(leaf.shape), stride))
            offset += -(-leaf.nbytes // _ALIGNMENT) * _ALIGNMENT
        parts.append(Part(table, short, key, tuple(places)))
    return tuple(parts), -(-offset // PAGE) * PAGE


def _tensors(
    name: str, module: torch.nn.Module
) -> Iterator[tuple[dict[str, torch.Tensor], str, str, torch.Tensor]]:
    for path, child in module.named_modules(prefix=name):
        for table in (child._parameters, child._buffers):
            for short, tensor in table.items():
                if tensor is not None:
                    yield table, short, f"{path}.{short}", tensor


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether a copy of it can keep its strides, by which kernels are chosen."""
    return torch.empty_like(tensor, device="meta").stride() == tensor.stride()


def _contiguous(shape: torch.Size) -> tuple[int, ...]:
    return torch.empty(shape, device="meta").stride()


def _slab_of(parts: tuple[Part, ...], size: int) -> torch.Tensor | None:
    """The slab in which the parts lie already, if they do."""
    flat = [
        (leaf, tensor)
        for part in parts
        for leaf, tensor in zip(part.leaves, leaves(part.tensor), strict=True)
    ]
    if not flat:
        return torch.empty(0, dtype=torch.uint8)
    first = flat[0][1]
    if first.device.type != "cpu" or first.is_meta:
        return None
    base = first.data_ptr() - flat[0][0].offset
    storage = first.untyped_storage()
    start = base - storage.data_ptr()
    if start < 0 or start + size > storage.nbytes() or base % PAGE:
        return None
    if not all(
        leaf.lies_in(tensor, base) and tensor.untyped_storage().data_ptr() == storage.data_ptr()
        for leaf, tensor in flat
    ):
        return None
    return torch.empty(0, dtype=torch.uint8).set_(storage, start, (size,))


def _moved(parts: tuple[Part, ...], size: int) -> torch.Tensor:
    slab = host_memory(size)
    for part in parts:
        for leaf, tensor in zip(part.leaves, leaves(part.tensor), strict=True):
            if tensor.is_meta:  # a weight that the file did not have; core makes zeros of it
                leaf.view(slab).zero_()
            else:
                leaf.view(slab).copy_(tensor)
    return slab


def _shared(
    parts: tuple[Part, ...], name: str, twin: torch.nn.Module | None
) -> list[tuple[Part, dict[str, torch.Tensor]]]:
    """The parts that a twin has in the same memory, with its tables; none of what lies in a mapped file."""
    if twin is None:
        return []
    others = {key: (table, tensor) for table, _, key, tensor in _tensors(name, twin)}
    shared = []
    for part in parts:
        table, tensor = others.get(part.key, (None, None))
        if table is None or len(leaves(tensor)) != len(part.leaves):
            continue
        pairs = list(zip(leaves(part.tensor), leaves(tensor), strict=True))
        if all(_same_memory(mine, other) for mine, other in pairs):
            shared.append((part, table))
    return shared


def _same_memory(mine: torch.Tensor, other: torch.Tensor) -> bool:
    # A file that is mapped costs no memory of its own, and dynamic VRAM reads it faster than memory.
    return (
        mine.device.type == other.device.type == "cpu"
        and mine.data_ptr() == other.data_ptr()
        and mine.shape == other.shape
        and not hasattr(mine.untyped_storage(), "_comfy_tensor_mmap_refs")
    )


def _with_notes(view: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
    """`view` with what core noted on the tensor whose place it takes (the dtype that it casts it to)."""
    if hasattr(old, "_model_dtype"):
        view._model_dtype = old._model_dtype
    return view


# The objects that own the slabs, by address; each lives as long as a tensor uses its memory.
_owners: weakref.WeakValueDictionary[int, numpy.ndarray] = weakref.WeakValueDictionary()


def owner_of(slab: torch.Tensor) -> numpy.ndarray | None:
    """The object that dies with the memory of a slab of host_memory."""
    return _owners.get(slab.untyped_storage().data_ptr())


def host_memory(size: int) -> torch.Tensor:
    """Uninitialised host memory as uint8 [size] that begins at a page and shares none.

    Its owner is an object that can be watched (see owner_of), which a torch allocation has not.
    """
    array = numpy.empty(size + PAGE, dtype=numpy.uint8)
    start = -array.ctypes.data % PAGE
    with torch.inference_mode():
        slab = torch.from_numpy(array)[start : start + size]
    _owners[slab.untyped_storage().data_ptr()] = array
    return slab
