"""A block's weights in one slab: the same bits as before, in memory that is copied and page-locked whole."""

from __future__ import annotations

import weakref
from itertools import pairwise

import numpy
import offload_modules as modules
import pytest
import torch
from comfyui import inprocess
from offload_modules import Inner, Plain, Quantized, Scale, bits_of, frozen, pointers, ranges, tensors

slab = inprocess.pack_module("kernels_glue.offload.slab")
leaves = inprocess.pack_module("kernels_glue.offload.leaves")
Block = slab.Block

PAGE = 4096
Make = type[torch.nn.Module]

both = pytest.mark.parametrize("make", [Plain, Quantized])


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def strides(module: torch.nn.Module) -> dict[str, list[tuple[int, ...]]]:
    return {name: [leaf.stride() for leaf in leaves.leaves(t)] for name, t in tensors(module).items()}


def moved_away_and_back(module: torch.nn.Module) -> None:
    """Gives each tensor memory of its own, as `.to(device)` and `.to("cpu")` do."""
    with torch.inference_mode():
        for child in module.modules():
            for table in (child._parameters, child._buffers):
                for name, tensor in table.items():
                    if tensor is not None:
                        copy = tensor.detach().clone()
                        table[name] = frozen(copy) if isinstance(tensor, torch.nn.Parameter) else copy


# --- leaves ---------------------------------------------------------------------------------------


def test_a_plain_tensor_is_its_own_leaf() -> None:
    tensor = torch.randn(3, 4)
    [leaf] = leaves.leaves(frozen(tensor))
    assert leaf.data_ptr() == tensor.data_ptr() and not isinstance(leaf, torch.nn.Parameter)
    other = torch.randn(3, 4)
    assert leaves.rebuilt(tensor, [other]) is other


def test_a_quantized_tensor_is_rebuilt_around_other_leaves() -> None:
    weight = modules.int8_weight(16, 32)
    parts = leaves.leaves(weight)
    assert [(part.dtype, tuple(part.shape)) for part in parts] == [
        (torch.int8, (16, 32)),
        (torch.float32, (16, 1)),
    ]
    copies = [part.clone() for part in parts]
    again = leaves.rebuilt(weight, copies)
    assert type(again) is type(weight) and again.shape == weight.shape and again.dtype == weight.dtype
    assert [leaf.data_ptr() for leaf in leaves.leaves(again)] == [leaf.data_ptr() for leaf in copies]
    assert again._params.convrot and again._params.convrot_groupsize == 16
    assert torch.equal(again.dequantize(), weight.dequantize())


# --- moving ---------------------------------------------------------------------------------------


@both
def test_every_form_of_weight_keeps_its_bits_in_one_slab(make: Make) -> None:
    module = make()
    before, forms = bits_of(module), strides(module)
    block = Block("blocks.0", module)
    assert bits_of(module) == before
    # One contiguous slab of whole pages, in which everything lies and nothing overlaps.
    host = block.host
    assert host.dtype == torch.uint8 and host.is_contiguous() and host.device.type == "cpu"
    assert host.nbytes == block.bytes == slab.slab_bytes(module)
    assert host.data_ptr() % PAGE == 0 and block.bytes % PAGE == 0
    found = ranges(module)
    assert found[0][0] >= host.data_ptr() and found[-1][1] <= host.data_ptr() + host.nbytes
    assert all(end <= start for (_, end), (start, _) in pairwise(found))
    assert len(found) == sum(leaf.numel() > 0 for t in tensors(module).values() for leaf in leaves.leaves(t))
    # Kernels are chosen by strides and alignment. Strides of what is not dense have no place in a slab.
    now = strides(module)
    assert {name for name in forms if now[name] != forms[name]} == {"inner.part", "inner.expanded"}
    assert all(start % 256 == 0 for start, _ in found)
    assert now["inner.transposed"] == [(1, 4)]


def test_the_names_are_those_of_the_models_state_dict() -> None:
    model = torch.nn.ModuleDict({"blocks": torch.nn.ModuleList([Quantized()])})
    block = Block("blocks.0", model["blocks"][0])
    keys = {part.key for part in block.parts}
    assert len(keys) == len(block.parts)
    assert keys == set(model.state_dict()) | {"blocks.0.inner.hidden"}  # which is not persistent


def test_the_slab_needs_little_more_than_the_weights() -> None:
    module = torch.nn.ModuleList([torch.nn.Linear(64, 64) for _ in range(10)])
    size = sum(t.nbytes for t in module.parameters())
    assert size <= slab.slab_bytes(module) <= size + 20 * 256 + PAGE


def test_parameters_stay_parameters_without_gradients_in_the_models_own_tables() -> None:
    module = Inner()
    tables = {id(module._parameters), id(module._buffers)}
    Block("b", module)
    assert {id(module._parameters), id(module._buffers)} == tables
    assert all(isinstance(p, torch.nn.Parameter) and not p.requires_grad for p in module.parameters())
    assert module.nothing is None and module.absent is None
    assert not any(isinstance(b, torch.nn.Parameter) for b in module.buffers())
    assert "hidden" not in module.state_dict() and "counts" in module.state_dict()


def test_writing_into_the_slab_changes_the_weights() -> None:
    module = Scale(3)
    block = Block("b", module)
    [weight] = [part for part in block.parts if part.name == "weight"]
    weight.leaves[0].view(block.host).fill_(7.0)
    assert module.weight.tolist() == [7.0] * 300 and module.bias.tolist() == [1.5] * 300


@both
def test_a_second_block_takes_the_slab_over(make: Make) -> None:
    module = make()
    first = Block("b", module)
    where, what = pointers(module), bits_of(module)
    second = Block("b", module)
    assert second.host.data_ptr() == first.host.data_ptr() and second.bytes == first.bytes
    assert pointers(module) == where and bits_of(module) == what
    assert slab.owner_of(second.host) is slab.owner_of(first.host) is not None
    host = first.host.data_ptr()
    del first
    assert slab.owner_of(second.host) is not None and second.host.data_ptr() == host


@both
def test_weights_that_moved_away_and_back_get_a_new_slab(make: Make) -> None:
    module = make()
    first = Block("b", module)
    what = bits_of(module)
    moved_away_and_back(module)
    second = Block("b", module)
    assert second.host.data_ptr() != first.host.data_ptr()
    assert bits_of(module) == what
    assert ranges(module)[0][0] >= second.host.data_ptr()
    assert ranges(module)[-1][1] <= second.host.data_ptr() + second.bytes


def test_one_weight_that_was_replaced_is_no_longer_in_the_slab() -> None:
    """As core replaces weights with set_attr_param."""
    for path in ("modulation", "inner.scalar", "int8.weight", "inner.counts"):
        module = Quantized()
        first = Block("b", module)
        owner, _, name = path.rpartition(".")
        child = module.get_submodule(owner)
        table = child._parameters if name in child._parameters else child._buffers
        table[name] = table[name].clone() if table is child._buffers else frozen(table[name].detach().clone())
        what = bits_of(module)
        second = Block("b", module)
        assert second.host.data_ptr() != first.host.data_ptr(), path
        assert bits_of(module) == what
        assert torch.equal(second.host[:0], first.host[:0])


@pytest.mark.parametrize(("first", "second"), [(0, 512), (512, 0), (256, 512)])
def test_weights_that_lie_elsewhere_in_one_storage_are_no_slab(first: int, second: int) -> None:
    """The layout has them at bytes 0 and 256 of a page."""
    memory = slab.host_memory(2 * PAGE)
    with torch.inference_mode():
        memory.zero_()
        module = torch.nn.Module()
        module.a = frozen(memory[first : first + 256].view(torch.float32))
        module.b = frozen(memory[second : second + 256].view(torch.float32))
    block = Block("m", module)
    assert block.host.data_ptr() != memory.data_ptr() and block.host.data_ptr() % PAGE == 0
    assert module.a.data_ptr() == block.host.data_ptr() == module.b.data_ptr() - 256


def test_an_empty_block_has_an_empty_slab() -> None:
    block = Block("b", torch.nn.Identity())
    assert block.bytes == 0 and block.host.nbytes == 0 and block.parts == ()
    module = torch.nn.Module()
    module.empty = frozen(torch.empty(0, 3))
    assert Block("b", module).bytes == 0 and module.empty.shape == (0, 3)


def test_an_empty_weight_may_lie_at_the_end_of_the_slab() -> None:
    module = torch.nn.Module()
    module.full = frozen(torch.randn(PAGE // 4))
    module.empty = frozen(torch.empty(0, 3, dtype=torch.float64))
    what = bits_of(module)
    block = Block("b", module)
    assert block.bytes == PAGE and bits_of(module) == what
    assert Block("b", module).host.data_ptr() == block.host.data_ptr()


def test_weights_that_the_file_did_not_have_become_zeros() -> None:
    module = torch.nn.Linear(4, 4, device="meta")
    Block("b", module)
    assert not module.weight.any() and not module.bias.any() and module.weight.device.type == "cpu"


def test_a_file_that_is_mapped_is_left_alone(tmp_path: object) -> None:
    from pathlib import Path

    path = Path(str(tmp_path)) / "weights"
    numpy.arange(64, dtype=numpy.float32).tofile(path)
    mapped = numpy.memmap(path, dtype=numpy.float32, mode="r+")
    module = torch.nn.Module()
    module.w = frozen(torch.from_numpy(mapped))
    Block("b", module)
    with torch.inference_mode():
        module.w.zero_()
    assert mapped[5] == 5.0


# --- binding --------------------------------------------------------------------------------------


@both
def test_weights_are_views_of_the_slab_they_are_bound_to(make: Make) -> None:
    module = make()
    block = Block("b", module)
    what, at_home = bits_of(module), pointers(module)
    with torch.inference_mode():
        device = torch.full((block.bytes + PAGE,), 255, dtype=torch.uint8)
        device[: block.bytes].copy_(block.host)
    block.bind(device)
    assert bits_of(module) == what
    assert ranges(module)[0][0] >= device.data_ptr()
    assert ranges(module)[-1][1] <= device.data_ptr() + block.bytes
    block.bind_host()
    assert pointers(module) == at_home and bits_of(module) == what


def test_a_device_slab_dies_when_it_is_forgotten() -> None:
    block = Block("b", Scale(1))
    array = numpy.zeros(block.bytes, dtype=numpy.uint8)
    gone = weakref.ref(array)
    with torch.inference_mode():
        device = torch.from_numpy(array)
    del array
    block.bind(device)
    block.bind_host()
    block.forget()
    del device
    assert gone() is None
    assert block.module.weight.tolist() == [2.0] * 300


@both
def test_changed_scales_in_the_slab_are_those_of_the_weight(make: Make) -> None:
    """As a LoRA changes them, on the host and in a device slab that held the block before."""
    module = make()
    block = Block("b", module)
    with torch.inference_mode():
        device = block.host.clone()
        block.bind(device)
        for part in block.parts:
            for leaf in part.leaves:
                leaf.view(block.host).zero_()
        device.copy_(block.host)
    for bind in (block.bind_host, lambda: block.bind(device)):
        bind()
        for name, tensor in tensors(module).items():
            assert not any(leaf.to(torch.float32).any() for leaf in leaves.leaves(tensor)), name
