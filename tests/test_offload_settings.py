"""The settings of Layerwise Offload: what they refuse, what they mean, and how they meet ComfyUI's wishes."""

from __future__ import annotations

import math
from typing import Any

import pytest
from comfyui import inprocess

config = inprocess.pack_module("kernels_glue.offload.config")
handle = inprocess.pack_module("kernels_glue.offload.handle")
plan = inprocess.pack_module("kernels_glue.offload.plan")
report = inprocess.pack_module("kernels_glue.offload.report")
strategy = inprocess.pack_module("kernels_glue.offload.strategy")
KitchenSolError = inprocess.pack_module("kernels_glue.errors").KitchenSolError
OffloadConfig = config.OffloadConfig

GIB = 2**30
# Eight blocks of half a GiB, and half a GiB outside of them.
SIZES = plan.Sizes(GIB // 2, (GIB // 2,) * 8)


def offload(**settings: Any) -> Any:
    return handle.Offload(OffloadConfig(**settings))


# --- values ---------------------------------------------------------------------------------------

NO_NUMBERS = ("1", "", "auto", None, True, False, math.nan, math.inf, -math.inf, 1j, [1], (), {})
BEYOND = {
    "vram_budget_gb": (-0.001, 1024.001, -1, 1e300),
    "resident_blocks": (-2, 4097, 1.5, -0.5),
    "prefetch_blocks": (-1, 65, 0.5),
    "max_pinned_gb": (-0.001, 4096.001),
}


@pytest.mark.parametrize("name", BEYOND)
def test_a_bad_number_is_refused_by_name_and_value(name: str) -> None:
    for value in (*NO_NUMBERS, *BEYOND[name]):
        with pytest.raises(KitchenSolError) as refusal:
            OffloadConfig(**{name: value})
        assert refusal.value.node == "Layerwise Offload"
        assert refusal.value.problem == f"{name} is {value!r}."
        assert refusal.value.remedy.startswith("Give a")


@pytest.mark.parametrize("name", ["pin_memory", "strategy"])
def test_what_is_no_option_is_refused_with_the_options(name: str) -> None:
    options = {"pin_memory": "auto, on, off", "strategy": "auto, stream, core"}[name]
    for value in ("", "Auto", "auto ", None, True, False, 0, 1, math.nan, ["auto"], ("auto",), {"auto"}):
        with pytest.raises(KitchenSolError) as refusal:
            OffloadConfig(**{name: value})
        assert refusal.value.problem == f"{name} is {value!r}."
        assert refusal.value.remedy == f"Choose one of {options}."


def test_the_lowest_and_highest_values_are_taken() -> None:
    for name, (low, high) in config.BOUNDS.items():
        for value in (low, high):
            assert getattr(OffloadConfig(**{name: value}), name) == value


def test_a_gib_is_two_to_the_thirtieth_and_nothing_is_the_nodes_own_choice() -> None:
    assert OffloadConfig(vram_budget_gb=1.5).budget == 3 * 2**29
    assert OffloadConfig(max_pinned_gb=0.25).pinned_limit == 2**28
    for nothing in (0, 0.0, -0.0):
        settings = OffloadConfig(vram_budget_gb=nothing, max_pinned_gb=nothing)
        assert settings.budget is None and settings.pinned_limit is None


def test_a_whole_number_may_be_a_float() -> None:
    wishes = offload(resident_blocks=2.0, prefetch_blocks=1.0).wishes
    assert plan.make_plan(SIZES, math.inf, wishes) == plan.make_plan(SIZES, math.inf, plan.Wishes(2, 1))


def test_a_number_too_large_for_a_float_is_refused() -> None:
    with pytest.raises(KitchenSolError):
        OffloadConfig(resident_blocks=10**400)


# --- strategy -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "dynamic", "name"),
    [
        ({"strategy": "stream"}, True, "stream"),
        ({"strategy": "core"}, False, "core"),
        ({"strategy": "core", "vram_budget_gb": 1.0}, True, "core"),
        ({}, False, "stream"),
        ({}, True, "stream"),
        # 4.5 GiB in all.
        ({"vram_budget_gb": 4.5}, True, "core"),
        ({"vram_budget_gb": 4.5}, False, "stream"),
        ({"vram_budget_gb": 4.5, "resident_blocks": 8}, True, "stream"),
        ({"vram_budget_gb": 4.4999}, True, "stream"),
    ],
)
def test_who_moves_the_weights(settings: dict[str, Any], dynamic: bool, name: str) -> None:
    chosen = strategy.choose(OffloadConfig(**settings), SIZES, dynamic)
    assert chosen.name == name
    assert report.strategy_line(chosen).text == f"strategy {name}: {chosen.why}" and chosen.why
    # A choice of the user's is said to be one, and one of the node's is not.
    assert (chosen.why == "as set on the node") == ("strategy" in settings)


# --- what ComfyUI allows ----------------------------------------------------------------------------


def test_the_users_budget_counts_where_comfyui_allows_as_much() -> None:
    for allowed in (3 * GIB, 3.5 * GIB, math.inf):
        made, remarks = offload(vram_budget_gb=3.0).plan(SIZES, allowed)
        # 3 GiB less what is outside and two slots: three blocks.
        assert len(made.resident) == 3 and made.device_bytes == 3 * GIB and remarks == ()


def test_without_a_budget_comfyuis_room_is_one() -> None:
    made, remarks = offload().plan(SIZES, 2.5 * GIB)
    assert made.device_bytes == 2.5 * GIB and len(made.resident) == 2 and remarks == ()
    made, remarks = offload().plan(SIZES, math.inf)
    assert made.streamed == () and remarks == ()


def test_less_room_than_the_budget_is_used_and_said() -> None:
    made, remarks = offload(vram_budget_gb=3.0).plan(SIZES, 2.5 * GIB)
    assert made.device_bytes == 2.5 * GIB
    [remark] = remarks
    assert "3.00 GiB" in remark.text and "2.50 GiB" in remark.text


def test_less_room_that_makes_no_difference_is_not_worth_a_word() -> None:
    made, remarks = offload(vram_budget_gb=3.0, resident_blocks=1).plan(SIZES, 2.5 * GIB)
    assert len(made.resident) == 1 and remarks == ()
    assert offload(vram_budget_gb=9.0).plan(SIZES, 5 * GIB)[1] == ()  # everything is resident either way


def test_the_least_is_used_and_said_where_comfyui_finds_less_room_than_that() -> None:
    for settings in ({}, {"resident_blocks": 0}, {"vram_budget_gb": 2.0}):
        made, remarks = offload(**settings).plan(SIZES, 1.0 * GIB)
        assert made.resident == () and made.slots == 1 and made.device_bytes == 1.0 * GIB
        [remark] = remarks
        assert "1.00 GiB" in remark.text and remark.kind == "note"


def test_wanted_resident_blocks_that_do_not_fit_are_an_error() -> None:
    for settings, allowed, needed in (
        ({}, 2 * GIB, "3.00 GiB"),  # with one slab
        ({"vram_budget_gb": 9.0}, 2 * GIB, "3.00 GiB"),
        ({"vram_budget_gb": 2.0}, 9e9, "3.50 GiB"),
    ):
        with pytest.raises(KitchenSolError) as refusal:
            offload(resident_blocks=4, **settings).plan(SIZES, allowed)
        assert refusal.value.problem.startswith(f"resident_blocks is 4, which needs {needed}")
        assert "2.00 GiB" in refusal.value.problem


def test_the_budget_holds_where_comfyui_finds_even_less_room() -> None:
    """Streaming needs 1.5 GiB, and 1 GiB where nothing is copied ahead."""
    for allowed in (math.inf, 1.25 * GIB):
        with pytest.raises(KitchenSolError):
            offload(vram_budget_gb=1.25).plan(SIZES, allowed)
    for allowed in (1.0 * GIB, 0.75 * GIB, 0.0, -GIB):
        assert offload(vram_budget_gb=1.25).plan(SIZES, allowed)[0].device_bytes == GIB
        with pytest.raises(KitchenSolError):
            offload(vram_budget_gb=0.75).plan(SIZES, allowed)


def test_a_budget_below_the_least_is_an_error_where_comfyui_allows_as_much() -> None:
    for allowed in (1.25 * GIB, 2.0 * GIB, math.inf):
        with pytest.raises(KitchenSolError) as refusal:
            offload(vram_budget_gb=1.25).plan(SIZES, allowed)
        assert refusal.value.problem.startswith(
            "the budget is 1.25 GiB, and this model needs at least 1.50 GiB"
        )


def test_memory_that_comfyui_wants_back_is_given_where_the_plan_may_change() -> None:
    given = offload(vram_budget_gb=4.0)
    for size in (4.0, 2.75, 1.5):
        assert given.plan_within(SIZES, size * GIB).device_bytes <= size * GIB
    assert len(given.plan_within(SIZES, 2.75 * GIB).resident) == 2
    for size in (1.5 * GIB - 1, 0, -GIB):
        assert given.plan_within(SIZES, size) is None


def test_resident_blocks_that_were_set_are_not_given_back_one_by_one() -> None:
    for resident in (0, 2, 8):
        assert offload(resident_blocks=resident).plan_within(SIZES, 4 * GIB) is None


@pytest.mark.parametrize("size", [0.0, 1e32, 2e32])
def test_what_core_writes_for_no_limit_is_none(size: float) -> None:
    assert handle.allowed_bytes(size, True) == math.inf
    assert handle.allowed_bytes(size, False) == (math.inf if size else 0.0)
