"""The blocks that Layerwise Offload finds, in the order in which they run, and what it refuses."""

from __future__ import annotations

import pytest
import torch
from comfyui import inprocess

find_blocks = inprocess.pack_module("kernels_glue.offload.lists").find_blocks
KitchenSolError = inprocess.pack_module("kernels_glue.errors").KitchenSolError


class DiTBlock(torch.nn.Module):
    def __init__(self, shared: torch.nn.Module | None = None) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(4)
        self.mlp = torch.nn.Linear(4, 4)
        if shared is not None:
            self.shared = shared


def model(**lists: list[torch.nn.Module]) -> torch.nn.Module:
    made = torch.nn.Module()
    for name, blocks in lists.items():
        made.register_module(name, torch.nn.ModuleList(blocks))
    return made


def test_side_lists_come_first_and_are_aside() -> None:
    doubles, singles, refiners = ([DiTBlock() for _ in range(n)] for n in (2, 3, 1))
    found = find_blocks(model(single_blocks=singles, double_blocks=doubles, noise_refiner=refiners))
    assert found.lists == (("noise_refiner", 1), ("double_blocks", 2), ("single_blocks", 3))
    assert [name for name, _ in found.blocks] == [
        "noise_refiner.0",
        *(f"double_blocks.{i}" for i in range(2)),
        *(f"single_blocks.{i}" for i in range(3)),
    ]
    assert [block for _, block in found.blocks] == [*refiners, *doubles, *singles]
    assert found.aside == frozenset({0})


def test_a_block_that_stands_in_two_places_is_found_once() -> None:
    block, other = DiTBlock(), DiTBlock()
    found = find_blocks(model(blocks=[block, other, block]))
    assert [name for name, _ in found.blocks] == ["blocks.0", "blocks.1"]


def test_a_model_without_block_lists_has_none() -> None:
    assert find_blocks(torch.nn.Sequential(torch.nn.Linear(2, 2))).blocks == ()


@pytest.mark.parametrize(
    "shared",
    [
        torch.nn.Linear(4, 4),
        torch.nn.Linear(4, 4, bias=False),
        torch.nn.Sequential(torch.nn.Linear(4, 4)),  # has no weights of its own
        torch.nn.BatchNorm1d(4, affine=False),  # has buffers alone
    ],
    ids=["weight and bias", "weight", "inside", "buffers"],
)
@pytest.mark.parametrize("lists", [("blocks", "blocks"), ("double_blocks", "single_blocks")])
def test_blocks_that_share_a_part_with_weights_are_refused(
    shared: torch.nn.Module, lists: tuple[str, str]
) -> None:
    blocks: dict[str, list[torch.nn.Module]] = {}
    for name in lists:
        blocks.setdefault(name, []).append(DiTBlock(shared))
    with pytest.raises(KitchenSolError) as refusal:
        find_blocks(model(**blocks))
    first = f"{lists[0]}.0"
    second = f"{lists[1]}.{len(blocks[lists[1]]) - 1}"
    owner = next(m for m in shared.modules() if any(True for _ in (*m.parameters(False), *m.buffers(False))))
    assert refusal.value.problem == (
        f"the blocks {first} and {second} share a {type(owner).__name__}, which cannot be in two places."
    )
    assert refusal.value.remedy == "Connect this model without the node."


@pytest.mark.parametrize(
    "shared",
    [torch.nn.SiLU(), torch.nn.LayerNorm(4, elementwise_affine=False)],
    ids=["activation", "norm without weights"],
)
def test_parts_without_weights_may_be_shared(shared: torch.nn.Module) -> None:
    assert len(find_blocks(model(blocks=[DiTBlock(shared), DiTBlock(shared)])).blocks) == 2


def test_a_part_that_is_twice_in_one_block_is_its_own() -> None:
    block = DiTBlock()
    block.again = block.mlp
    assert len(find_blocks(model(blocks=[block, DiTBlock()])).blocks) == 2
