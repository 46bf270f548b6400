"""Results of a comparison as the engine gives them, made by hand for the tests of what is told of them."""

from __future__ import annotations

import math
from typing import Any

from comfyui import inprocess

results = inprocess.pack_module("kernels_glue.compare.results")

GIB = 2**30
LIMIT = 37.0


def score(psnr: float) -> Any:
    """Of unit vectors: what belongs to a PSNR at peak 1."""
    if not math.isfinite(psnr):
        return results.Score(psnr, 1.0, 0.0) if psnr > 0 else results.Score(*[math.nan] * 3)
    return results.Score(psnr, 1 - 10 ** (-psnr / 10), 10 ** (-psnr / 20))


def steps(*psnrs: float) -> tuple[Any, ...]:
    """One step for each PSNR of the prediction; the latents start equal."""
    count = len(psnrs)
    return tuple(
        results.StepScore(index, 1 - index / count, score(psnr), score(math.inf if not index else psnr + 3))
        for index, psnr in enumerate(psnrs)
    )


def layers(count: int = 12) -> tuple[Any, ...]:
    """From the worst on, every third one an attention."""
    return tuple(
        results.LayerError(
            f"blocks.{i}.ffn.2" if i % 3 else str(i), "int8" if i % 3 else "attention", 0.3 / (i + 1), 3
        )
        for i in range(count)
    )


def trials(chosen: int | None = 3) -> Any:
    """A recommendation out of five trials that differ in tau."""
    made = tuple(
        results.Trial(tau, "blocks.1.ffn.2\nblocks.0", "0,3", 45 - 6 * tau)
        for tau in (1.0, 2.0, 1.5, 1.25, 1.3)
    )
    remarks = ("PSNR is assumed to fall as tau grows", "measured with this seed only")
    return results.Recommendation(LIMIT, made, None if chosen is None else made[chosen], remarks)


def comparison(**changes: Any) -> Any:
    """A Comparison; `changes` are its fields."""
    fields = {
        "steps": steps(40.0, 38.0, 33.5, 36.0),
        "final": results.FinalScore(31.234, 0.98765, None, False),
        "model": results.Usage(1.234, 2.5, 13 * GIB, 3 * GIB, 18 * GIB),
        "reference": results.Usage(2.468, 3.5, 30 * GIB, 5 * GIB, 36 * GIB),
        **changes,
    }
    return results.Comparison(**fields)
