"""Other values for some weights of a block: the originals stay where they are, the device gets the others."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from comfyui import inprocess
from offload_modules import Inner, Quantized, Scale, bits_of, frozen, int8_weight, pointers, tensors

slab = inprocess.pack_module("kernels_glue.offload.slab")
leaves = inprocess.pack_module("kernels_glue.offload.leaves").leaves
Block = slab.Block

PAGE = 4096
Values = dict[str, torch.Tensor]


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def others(*names: str) -> Values:
    """Other values for weights of Quantized, by name in the module."""
    module = Quantized()
    if "int8.weight" in names:
        with torch.inference_mode():
            leaves(module.int8.weight)[1].mul_(3)  # scales as no weight of this size has them
    return {name: tensors(module)[name] for name in names}


def keyed(values: Values) -> Values:
    """The names as core has them, for a block `b`; a bare parameter's name begins with its point."""
    return {f"b.{name}".replace("..", "."): value for name, value in values.items()}


def filled(block: Any, spare: int = 0) -> torch.Tensor:
    """A device slab with what the sources say, and 0xFF in all other places."""
    with torch.inference_mode():
        device = torch.full((block.bytes + spare,), 255, dtype=torch.uint8)
        for offset, source in block.sources:
            device[offset : offset + source.nbytes].copy_(source)
    return device


def with_others(module: torch.nn.Module, values: Values) -> dict[str, Any]:
    """The bits of a module whose weights would have other values."""
    holder = torch.nn.Module()
    found = bits_of(module)
    for name, value in values.items():
        holder.x = frozen(value.detach())
        assert bits_of(holder)[".x"] != found[name], "the other value is no other"
        found[name] = bits_of(holder)[".x"]
    return found


SOME = [
    (".modulation",),
    ("inner.p0", "inner.p1"),
    ("inner.p4", "inner.transposed"),
    ("inner.scalar", "inner.channels_last", "tied.bias"),
    ("inner.part", "inner.expanded"),
    ("tied.weight",),  # and not the other name of the same weight
    ("int8.weight",),
    (".modulation", "int8.weight"),
    ("tied_too.bias", "int8.weight"),
]


@pytest.mark.parametrize("names", SOME, ids="+".join)
def test_the_device_has_the_other_values_and_the_original_ones_elsewhere(names: tuple[str, ...]) -> None:
    module = Quantized()
    block = Block("b", module)
    at_home, before, original = pointers(module), bits_of(module), block.host.clone()
    values = others(*names)
    expected = with_others(module, values)
    held = dict(tensors(module))

    block.patch(keyed(values))
    assert bits_of(module) == expected
    moved = {name for name, where in pointers(module).items() if where != at_home[name]}
    assert moved == set(names)
    block.bind(filled(block, spare=PAGE))
    assert bits_of(module) == expected
    block.bind_host()
    assert bits_of(module) == expected
    # Whoever holds the original weights never sees others.
    assert torch.equal(block.host, original)
    assert {name: [leaf.data_ptr() for leaf in leaves(t)] for name, t in held.items()} == at_home

    block.unpatch()
    assert bits_of(module) == before and pointers(module) == at_home
    assert torch.equal(block.host, original)
    assert block.slabs == (block.host,)
    [(offset, whole)] = block.sources
    assert (offset, whole.data_ptr(), whole.nbytes) == (0, block.host.data_ptr(), block.bytes)
    block.bind(filled(block))
    assert bits_of(module) == before


def test_a_quantized_weight_computes_with_its_new_scales() -> None:
    module = Quantized()
    block = Block("b", module)
    before = module.int8.weight.dequantize()
    value = others("int8.weight")["int8.weight"]
    block.patch({"b.int8.weight": value})
    second = block.slabs[1]
    for bind in (block.bind_host, lambda: block.bind(filled(block))):
        bind()
        weight = module.int8.weight
        assert type(weight) is type(int8_weight(16, 32)) and isinstance(weight, torch.nn.Parameter)
        assert torch.equal(weight.dequantize(), value.dequantize())
        assert not torch.equal(weight.dequantize(), before)
        assert weight._params.convrot and weight._params.convrot_groupsize == 16
    block.bind_host()
    for leaf in leaves(module.int8.weight):
        assert second.data_ptr() <= leaf.data_ptr() < second.data_ptr() + second.nbytes
    block.unpatch()
    assert torch.equal(module.int8.weight.dequantize(), before)


# --- pieces -----------------------------------------------------------------------------------------

# Five weights of 300 floats, each of which takes 1280 bytes of a slab: the next multiple of 256.
SPAN = 1280
HOST, OTHER = 0, 1


def five() -> Any:
    module = torch.nn.Module()
    for number, name in enumerate("abcde"):
        module.register_parameter(name, frozen(torch.full((300,), float(number))))
    return Block("b", module)


def pieces(block: Any) -> list[tuple[int, int, int, int]]:
    """(offset on the device, slab, offset in it, bytes) of each piece, without what no weight needs."""
    found = []
    for offset, source in block.sources:
        [(index, whole)] = [
            (i, s) for i, s in enumerate(block.slabs) if 0 <= source.data_ptr() - s.data_ptr() < s.nbytes
        ]
        found.append((offset, index, source.data_ptr() - whole.data_ptr(), source.nbytes))
    return found


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ("a", [(0, OTHER, 0, 1), (1, HOST, 1, 4)]),
        ("e", [(0, HOST, 0, 4), (4, OTHER, 0, 1)]),
        ("bc", [(0, HOST, 0, 1), (1, OTHER, 0, 2), (3, HOST, 3, 2)]),
        ("cb", [(0, HOST, 0, 1), (1, OTHER, 0, 2), (3, HOST, 3, 2)]),
        (
            "ace",
            [(0, OTHER, 0, 1), (1, HOST, 1, 1), (2, OTHER, 1, 1), (3, HOST, 3, 1), (4, OTHER, 2, 1)],
        ),
        ("abcde", [(0, OTHER, 0, 5)]),
    ],
)
def test_weights_side_by_side_are_copied_in_one_piece(names: str, expected: list[tuple[int, ...]]) -> None:
    block = five()
    block.patch({f"b.{name}": torch.full((300,), 9.0) for name in names})
    assert pieces(block) == [
        (at * SPAN, index, start * SPAN, count * SPAN) for at, index, start, count in expected
    ]
    block.bind(filled(block))
    for number, name in enumerate("abcde"):
        assert getattr(block.module, name).tolist() == [9.0 if name in names else number] * 300


@pytest.mark.parametrize("count", [1, 3, 4, 5])
def test_the_second_slab_holds_what_changed_in_whole_pages(count: int) -> None:
    block = five()
    block.patch({f"b.{name}": torch.zeros(300) for name in "abcde"[:count]})
    host, second = block.slabs
    assert host is block.host and host.nbytes == block.bytes == 2 * PAGE
    # 3 * 1280 are less than a page, 4 * 1280 more.
    assert second.nbytes == (PAGE if count <= 3 else 2 * PAGE)
    assert second.data_ptr() % PAGE == 0 and slab.owner_of(second) is not slab.owner_of(host)


def test_data_and_scales_each_take_their_place_in_the_second_slab() -> None:
    module = torch.nn.Module()
    module.full = frozen(int8_weight(16, 240))  # 3840 bytes, and 64 of scales that take 256
    module.more = frozen(torch.zeros(1))
    block = Block("b", module)
    block.patch({"b.full": int8_weight(16, 240)})
    assert block.slabs[1].nbytes == PAGE
    block.patch({"b.full": int8_weight(16, 240), "b.more": torch.ones(1)})
    assert block.slabs[1].nbytes == 2 * PAGE


# --- one after the other ----------------------------------------------------------------------------


def test_the_other_values_take_the_place_of_earlier_ones() -> None:
    block = five()
    block.patch({"b.a": torch.full((300,), 7.0), "b.b": torch.full((300,), 7.0)})
    device = filled(block)
    block.bind(device)  # the views of a device slab are kept
    gone = weakref.ref(slab.owner_of(block.slabs[1]))
    block.patch({"b.b": torch.full((300,), 8.0)})
    assert gone() is None
    for bind in (block.bind_host, lambda: block.bind(device)):
        with torch.inference_mode():
            device.copy_(filled(block))
        bind()
        assert [getattr(block.module, name)[0].item() for name in "abcde"] == [0.0, 8.0, 2.0, 3.0, 4.0]


def test_the_memory_of_other_values_goes_with_them() -> None:
    block = five()
    block.patch({"b.c": torch.zeros(300)})
    gone = weakref.ref(slab.owner_of(block.slabs[1]))
    assert gone() is not None
    block.unpatch()
    assert gone() is None


def test_the_values_are_copied_when_they_are_given() -> None:
    block, value = five(), torch.full((300,), 7.0)
    block.patch({"b.c": value})
    value.zero_()
    assert block.module.c.tolist() == [7.0] * 300


def test_what_is_patched_stays_a_parameter_without_gradient() -> None:
    block = five()
    block.patch({"b.c": torch.zeros(300)})
    assert all(isinstance(p, torch.nn.Parameter) and not p.requires_grad for p in block.module.parameters())
    assert list(block.module.state_dict()) == list("abcde")


def test_a_twin_keeps_the_original_weights() -> None:
    module, twin = Scale(2), Scale(0)
    twin.weight, twin.bias = frozen(module.weight.detach()), module.bias
    block = Block("b", module, twin)
    where = pointers(twin)
    block.patch({"b.weight": torch.full((300,), 7.0)})
    assert module.weight.tolist() == [7.0] * 300
    assert twin.weight.tolist() == [3.0] * 300 and pointers(twin) == where


def test_an_empty_weight_takes_no_place_of_the_next_one() -> None:
    module = Inner()
    block = Block("b", module)
    before = bits_of(module)
    block.patch({"b.empty": torch.empty(0, 4), "b.tail": torch.empty(0)})
    assert bits_of(module) == before
    block.bind(filled(block))
    assert bits_of(module) == before
