"""Who shares a block's memory, how much is needed while it moves, and when it goes."""

from __future__ import annotations

import weakref

import numpy
import offload_modules as modules
import pytest
import torch
from comfyui import inprocess
from offload_modules import Plain, Quantized, Scale, bits_of, frozen, pointers, tensors

slab = inprocess.pack_module("kernels_glue.offload.slab")
Block = slab.Block

PAGE = 4096
Make = type[torch.nn.Module]


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


# --- twins ----------------------------------------------------------------------------------------


def twin_of(module: torch.nn.Module, make: Make) -> torch.nn.Module:
    """Another module with the same memory, each weight in a parameter of its own."""
    other = make()
    for path, child in module.named_modules():
        mine = other.get_submodule(path)
        for name, tensor in child._parameters.items():
            mine._parameters[name] = None if tensor is None else frozen(tensor.detach())
        for name, tensor in child._buffers.items():
            mine._buffers[name] = None if tensor is None else tensor.detach()
    return other


@pytest.mark.parametrize("make", [Plain, Quantized])
def test_a_twin_in_the_same_memory_moves_along(make: Make) -> None:
    module = make()
    twin = twin_of(module, make)
    twin.inner.p1._model_dtype = torch.float16  # core's note, on one that moves
    what = bits_of(module)
    # The first leaf of each is the one that costs memory.
    full = [name for name, t in tensors(module).items() if t.numel()]
    assert all(pointers(twin)[name][0] == pointers(module)[name][0] for name in full)
    block = Block("b", module, twin)
    assert bits_of(module) == what and bits_of(twin) == what
    mine, others = pointers(module), pointers(twin)
    assert [name for name in full if mine[name][0] != others[name][0]] == []
    assert all(block.host.data_ptr() <= others[n][0] < block.host.data_ptr() + block.bytes for n in full)
    assert twin.inner.p1._model_dtype == torch.float16
    assert not any(a is b for a, b in zip(module.parameters(), twin.parameters(), strict=True))


def test_a_twin_stays_in_host_memory_while_the_block_is_on_the_device() -> None:
    module = Scale(2)
    twin = Scale(0)
    twin.weight, twin.bias = frozen(module.weight.detach()), module.bias
    block = Block("b", module, twin)
    where = pointers(twin)
    with torch.inference_mode():
        block.bind(torch.zeros_like(block.host))
    assert pointers(twin) == where and twin.weight.tolist() == [3.0] * 300
    assert module.weight.tolist() == [0.0] * 300


def test_a_twin_with_other_memory_does_not_move() -> None:
    module, twin = Scale(2), Scale(5)
    shared = Scale(2)
    shared.weight = frozen(module.weight.detach())  # and a bias of its own
    before, bias = pointers(twin), shared.bias.data_ptr()
    Block("b", module, twin)
    assert pointers(twin) == before and twin.weight.tolist() == [6.0] * 300
    module = Scale(2)
    shared.weight = frozen(module.weight.detach())
    Block("b", module, shared)
    assert shared.weight.data_ptr() == module.weight.data_ptr()
    assert shared.bias.data_ptr() == bias != module.bias.data_ptr()


def test_a_twin_of_other_layers_does_no_harm() -> None:
    module = Scale(2)
    Block("b", module, torch.nn.Linear(3, 3))
    quantized = torch.nn.Module()
    quantized.weight = frozen(modules.int8_weight(16, 32))
    where = pointers(quantized)
    Block("b", Scale(1), quantized)
    assert pointers(quantized) == where


# --- memory ---------------------------------------------------------------------------------------


def test_moving_a_list_needs_one_block_more_at_most() -> None:
    alive: set[int] = set()
    most = 0

    def owned(size: int, number: int) -> torch.Tensor:
        array = numpy.full(size, number, dtype=numpy.uint8)
        alive.add(number)
        weakref.finalize(array, alive.discard, number)
        return torch.from_numpy(array)

    blocks, count = torch.nn.ModuleList(), 6
    for number in range(count):
        module = torch.nn.Module()
        module.a = frozen(owned(1000, 2 * number))
        module.b = frozen(owned(500, 2 * number + 1))
        blocks.append(module)
    assert len(alive) == 2 * count
    made = []
    for number, module in enumerate(blocks):
        made.append(Block(f"b.{number}", module))
        # Both old weights of the block are gone, and none of the next.
        assert alive == set(range(2 * number + 2, 2 * count))
        most = max(most, len(alive) + 2 * len(made))
    assert most == 2 * count
    assert [module.a[7].item() for module in blocks] == [0, 2, 4, 6, 8, 10]


def test_the_owner_of_a_slab_dies_with_the_last_view_of_it() -> None:
    module = Scale(4)
    block = Block("b", module)
    gone = weakref.ref(slab.owner_of(block.host))
    address = block.host.untyped_storage().data_ptr()
    del block
    assert gone() is not None  # the module lives in it
    view = module.weight[3:5].detach()
    del module
    assert gone() is not None and view.tolist() == [5.0, 5.0]
    del view
    assert gone() is None and address not in slab._owners


def test_only_slabs_have_owners() -> None:
    assert slab.owner_of(torch.zeros(PAGE, dtype=torch.uint8)) is None


@pytest.mark.parametrize("size", [1, PAGE, 3 * PAGE])
def test_host_memory_begins_at_a_page_and_shares_none(size: int) -> None:
    made = [slab.host_memory(size) for _ in range(20)]
    assert all(m.data_ptr() % PAGE == 0 and m.shape == (size,) and m.dtype == torch.uint8 for m in made)
    pages = [page for m in made for page in range(m.data_ptr() // PAGE, -(-(m.data_ptr() + size) // PAGE))]
    assert len(pages) == len(set(pages))
