"""One contiguous piece of memory a block, and the block's parameters and buffers as views of it."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

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

    @property
    def span(self) -> int:
        """Bytes up to where the next leaf begins."""
        return aligned(_extent(self.size, self.stride) * self.dtype.itemsize)

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
        stays: it is a parameter that is given other memory; anything else is replaced, as core does it.
    """

    table: dict[str, torch.Tensor]
    name: str
    key: str
    leaves: tuple[Leaf, ...]
    stays: bool

    @property
    def tensor(self) -> torch.Tensor:
        """What the module has now."""
        return self.table[self.name]

    def on(self, slab: torch.Tensor) -> torch.Tensor:
        """A view of a slab: the parameter or buffer itself, or what the one that stays is given."""
        now = self.tensor
        view = rebuilt(now, [leaf.view(slab) for leaf in self.leaves])
        if self.stays or not isinstance(now, torch.nn.Parameter):
            return view
        if type(view) is torch.Tensor:
            return torch.nn.Parameter(view, requires_grad=False)
        # What the constructor of Parameter marks too; it also detaches, and comfy_kitchen copies the scales
        # of a quantized tensor for that.
        view._is_param = True
        return view


class Block:
    """A block of a DiT whose weights lie in one slab of host memory.

    The first time, its weights are moved into a new slab: the module, and whoever else shares it, holds
    views of the slab from then on, and the memory where they lay before is free. Weights with a LoRA lie in
    a slab of their own beside it: others may hold the original ones.

    Args:
        name: of the module in the model, such as `diffusion_model.blocks.0`.
        twin: the same block of another model, whose weights that lie in the same memory move along.

    Attributes:
        bytes: what the block takes on the device.
        host: uint8 [bytes], the original weights.
        sources: (offset, uint8 tensor) of the pieces of host memory that make up the block on the device.
    """

    def __init__(self, name: str, module: torch.nn.Module, twin: torch.nn.Module | None = None):
        self.name = name
        self.module = module
        self.parts, self.bytes = _layout(name, module)
        self._originals = [part.tensor if part.stays else None for part in self.parts]
        self._bound: dict[int, list[torch.Tensor]] = {}
        self._patched: Patched | None = None
        # As in a node: core cannot move quantized tensors that are half made in this mode and half not.
        with torch.inference_mode():
            self._move_in(twin)
        self.unpatch()

    @property
    def slabs(self) -> tuple[torch.Tensor, ...]:
        """The host memory that is copied from."""
        return (self.host,) if self._patched is None else (self.host, self._patched.slab)

    def patch(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Gives some parts, by key, other values of the same forms; the original ones stay where they are."""
        self.unpatch()
        with torch.inference_mode():
            self._patched = Patched([part for part in self.parts if part.key in tensors], tensors)
            others = self._patched.views
            self._on_host = [others[p.key] if p.key in others else p.on(self.host) for p in self.parts]
            # The original parameters are others', who go on with what they hold.
            for at, part in enumerate(self.parts):
                if part.key in others and part.stays:
                    self._held[at] = torch.nn.Parameter(others[part.key], requires_grad=False)
                    part.table[part.name] = self._held[at]
        self.sources = tuple(_sources(self.parts, self.host, self._patched))
        self.bind_host()

    def unpatch(self) -> None:
        """Goes back to the original weights, and drops the others."""
        self._patched = None
        self.sources = ((0, self.host),)
        self._held = list(self._originals)
        for part, original in zip(self.parts, self._originals, strict=True):
            if original is not None:
                part.table[part.name] = original
        with torch.inference_mode():
            self._on_host = [part.on(self.host) for part in self.parts]
        self.bind_host()

    def bind(self, slab: torch.Tensor) -> None:
        """Makes the module's weights views of a slab on the device, of the block's bytes or more."""
        views = self._bound.get(slab.data_ptr())
        if views is None:
            with torch.inference_mode():
                views = self._bound[slab.data_ptr()] = [part.on(slab) for part in self.parts]
        self._set(views)

    def bind_host(self) -> None:
        """Makes the module's weights those in host memory."""
        self._set(self._on_host)

    def forget(self) -> None:
        """Drops the views of device slabs, which would keep these alive."""
        self._bound.clear()

    def _set(self, views: Sequence[torch.Tensor]) -> None:
        for part, held, view in zip(self.parts, self._held, views, strict=True):
            if held is None:
                part.table[part.name] = view
            else:
                # The same object, as in core: others may hold it, and follow it back to host memory.
                held.data = view

    def _move_in(self, twin: torch.nn.Module | None) -> None:
        self.host = _slab_of(self.parts, self.bytes)
        if self.host is None:
            shared = _shared(self.parts, self.name, twin)
            self.host = _moved(self.parts, self.bytes)
            for part, table in shared:
                if part.stays:
                    table[part.name].data = part.on(self.host)
                else:
                    table[part.name] = part.on(self.host)


class Patched:
    """Parts of a block with other values, one after the other in a slab of their own.

    Attributes:
        views: the parameters or buffers around it, by key.
    """

    def __init__(self, parts: Sequence[Part], tensors: Mapping[str, torch.Tensor]):
        self._at: dict[int, int] = {}
        size = 0
        for leaf in (leaf for part in parts for leaf in part.leaves if leaf.span):
            self._at[leaf.offset] = size
            size += leaf.span
        self.slab = host_memory(-(-size // PAGE) * PAGE)
        self.views: dict[str, torch.Tensor] = {}
        for part in parts:
            # An empty leaf is nowhere, and begins where the next one does.
            moved = [replace(x, offset=self._at[x.offset] if x.span else 0) for x in part.leaves]
            moved = replace(part, leaves=tuple(moved))
            for leaf, value in zip(moved.leaves, leaves(tensors[part.key]), strict=True):
                leaf.view(self.slab).copy_(value)
            self.views[part.key] = moved.on(self.slab)

    def source(self, leaf: Leaf) -> tuple[torch.Tensor, int] | None:
        """The slab and the place in it of a leaf of the block, or None."""
        at = self._at.get(leaf.offset)
        return None if at is None else (self.slab, at)


def _sources(
    parts: Sequence[Part], host: torch.Tensor, patched: Patched
) -> Iterator[tuple[int, torch.Tensor]]:
    """The runs of a block's leaves that lie in one piece of host memory."""
    run: list[Any] = []  # slab, place in it, offset in the block, bytes
    for leaf in (leaf for part in parts for leaf in part.leaves if leaf.span):
        slab, at = patched.source(leaf) or (host, leaf.offset)
        if run and run[0] is slab and run[1] + run[3] == at:
            run[3] += leaf.span
            continue
        if run:
            yield run[2], run[0][run[1] : run[1] + run[3]]
        run = [slab, at, leaf.offset, leaf.span]
    if run:
        yield run[2], run[0][run[1] : run[1] + run[3]]


def slab_bytes(module: torch.nn.Module) -> int:
    """Bytes of the slab that a block needs."""
    return _layout("", module)[1]


def _layout(name: str, module: torch.nn.Module) -> tuple[tuple[Part, ...], int]:
    parts, offset, seen = [], 0, set()
    for table, short, key, tensor in _tensors(name, module):
        places = []
        for leaf in leaves(tensor):
            stride = leaf.stride() if _is_dense(leaf) else _contiguous(leaf.shape)
            places.append(Leaf(offset, leaf.dtype, tuple(leaf.shape), stride))
            offset += places[-1].span
        # Tied weights are one object, and here two: a patch may reach one of them alone.
        stays = type(tensor) is torch.nn.Parameter and not tensor.is_meta and id(tensor) not in seen
        seen.add(id(tensor))
        parts.append(Part(table, short, key, tuple(places), stays))
    return tuple(parts), -(-offset // PAGE) * PAGE


def _tensors(
    name: str, module: torch.nn.Module
) -> Iterator[tuple[dict[str, torch.Tensor], str, str, torch.Tensor]]:
    for path, child in module.named_modules(prefix=name):
        for table in (child._parameters, child._buffers):
            for short, tensor in table.items():
                if tensor is not None:
                    yield table, short, f"{path}.{short}", tensor


def aligned(size: int) -> int:
    """Bytes rounded up to where a leaf may begin."""
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _extent(size: Sequence[int], stride: Sequence[int]) -> int:
    """Elements from the first to the last one."""
    if 0 in size:
        return 0
    return 1 + sum((n - 1) * step for n, step in zip(size, stride, strict=True))


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
        # Scales are copied whenever a quantized tensor is detached; what counts is the data.
        if _same_memory(leaves(part.tensor)[0], leaves(tensor)[0]):
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


# The objects that own the slabs, by address; each lives as long as a tensor uses its memory.
_owners: weakref.WeakValueDictionary[int, numpy.ndarray] = weakref.WeakValueDictionary()


def owner_of(slab: torch.Tensor) -> numpy.ndarray | None:
    """The object that dies with the memory of a slab of host_memory."""
    return _owners.get(slab.untyped_storage().data_ptr())


def host_memory(size: int) -> torch.Tensor:
    """Uninitialised host memory as uint8 [size] that begins at a page and shares none.

    Its owner can be watched (see owner_of), which is not so of an allocation of torch.
    """
    array = numpy.empty(size + PAGE, dtype=numpy.uint8)
    start = -array.ctypes.data % PAGE
    with torch.inference_mode():
        slab = torch.from_numpy(array)[start : start + size]
    _owners[slab.untyped_storage().data_ptr()] = array
    return slab
