"""Which processes run, which rows each of them measures, and what it takes to hold a budget. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

GIB = 2**30

# The first three run without dynamic VRAM, the others with it.
POLICIES = ("resident", "partial", "stream", "dynamic", "core")
CHILDREN = ("plain", "dynamic")
TITLES = {
    "resident": "resident",
    "partial": "ComfyUI partial",
    "stream": "stream",
    "dynamic": "ComfyUI dynamic",
    "core": "core",
    "stream+dynamic": "stream, under dynamic VRAM",
}

# Timed steps by length; long ones vary less and cost more.
TIMED_STEPS = {"2k": 4, "7k": 3, "33k": 1}
# An evaluation before the timed ones, and one after them. Both are untimed, and memory is measured in them.
UNTIMED_STEPS = 2

# What core keeps free for inference besides its reserve (comfy.model_management.minimum_inference_memory).
MINIMUM_INFERENCE = 0.8 * GIB

# What ComfyUI keeps free for others where no --reserve-vram is given (on Linux).
ORDINARY_RESERVE = 400 * 2**20

# About how long it takes until a process has its model.
SECONDS_TO_MAKE = 45.0


@dataclass(frozen=True)
class RowPlan:
    """One measurement. budget: GiB of weights on the device; None: all of them. policy: one of TITLES."""

    policy: str
    length: str
    budget: float | None = None

    @property
    def group(self) -> tuple[object, ...]:
        """Rows of one group go on with the loaded model: to unload and load it takes longer than to measure.

        Dynamic VRAM loads as it goes, and what it has loaded would be that of the longer row.
        """
        alone = self.length if self.policy in ("dynamic", "core") else None
        return self.policy, self.budget, alone

    @classmethod
    def read(cls, text: str) -> RowPlan:
        """`policy:length`, or `policy:length:budget`."""
        policy, length, *budget = text.split(":")
        if policy not in TITLES or length not in TIMED_STEPS:
            raise ValueError(text)
        return cls(policy, length, float(budget[0]) if budget else None)


@dataclass(frozen=True)
class ChildPlan:
    """A process and what it measures. budget: that of a process with dynamic VRAM, whose arguments fix it."""

    name: str
    budget: float | None
    rows: tuple[RowPlan, ...]


def plan_children(
    children: Sequence[str], policies: Sequence[str], lengths: Sequence[str], budgets: Sequence[float]
) -> list[ChildPlan]:
    """One process without dynamic VRAM, then one with it for each budget; those without rows are left out."""
    plans = []
    if "plain" in children:
        # In this order: `stream` moves the weights into pinned slabs, which would help core's loading.
        rows = [RowPlan("resident", length) for length in lengths if "resident" in policies]
        rows += [
            RowPlan(policy, length, budget)
            for policy in ("partial", "stream")
            if policy in policies
            for budget in budgets
            for length in lengths
        ]
        plans.append(ChildPlan("plain", None, tuple(rows)))
    if "dynamic" in children:
        for budget in budgets:
            rows = [
                RowPlan(policy, length, budget)
                for policy in ("dynamic", "core")
                if policy in policies
                for length in lengths
            ]
            # That it is the same there is worth one row, and only beside the others.
            if "stream" in policies and lengths:
                rows.append(RowPlan("stream+dynamic", lengths[0], budget))
            plans.append(ChildPlan("dynamic", budget, tuple(rows)))
    return [plan for plan in plans if plan.rows]


def plan_rows(rows: Sequence[RowPlan]) -> list[ChildPlan]:
    """The processes of a choice of rows."""
    plain = tuple(row for row in rows if row.policy in POLICIES[:3])
    plans = [ChildPlan("plain", None, plain)]
    dynamic = [row for row in rows if row not in plain]
    for budget in dict.fromkeys(row.budget for row in dynamic):
        plans.append(ChildPlan("dynamic", budget, tuple(row for row in dynamic if row.budget == budget)))
    return [plan for plan in plans if plan.rows]


def comfyui_arguments(plan: ChildPlan, reserve: float) -> str:
    """ComfyUI's command line for a process. reserve: bytes that dynamic VRAM must leave free."""
    if plan.budget is None:
        return "--disable-dynamic-vram"
    return f"--reserve-vram {reserve / GIB:.3f}"


def reserve_of_dynamic(total: float, outside: float, activations: float, budget: float) -> float:
    """Bytes of --reserve-vram with which weights have `budget` bytes of the device.

    Args:
        total: memory of the device in bytes.
        outside: bytes in use by other processes and by CUDA itself.
        activations: the highest need of everything that is no weight.
    """
    return max(0.0, total - outside - activations - budget)


def reserve_of_partial(free: float, memory_required: float, budget: float) -> float:
    """EXTRA_RESERVED_VRAM in bytes with which ComfyUI's partial loading gets `budget` bytes.

    comfy.model_management.load_models_gpu lets a model that is not loaded yet have, on NVIDIA cards,
    free - max(0.8 GiB + reserve, memory_required + reserve).

    Args:
        free: what get_free_memory says with the model unloaded, in bytes.
        memory_required: the second result of comfy.sampler_helpers.estimate_memory, in bytes.
    """
    return free - max(MINIMUM_INFERENCE, memory_required) - budget


def timed_steps(length: str, override: int | None) -> int:
    return override or TIMED_STEPS[length]


def seconds_of_row(step: float | None, timed: int) -> float:
    """About how long a row takes, from the resident model's step. For stopping before the time is over."""
    loading = 8.0
    return loading + 1.2 * (step or 0.0) * (timed + UNTIMED_STEPS)
