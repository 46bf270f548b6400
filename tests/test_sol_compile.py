"""Sol Attention Patch on a model that torch.compile compiles: right results, and no graph more than once.

Not among the core tests: tracing is slow, and it is torch's part of the work.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from comfyui.builders import TinyModel
from int8_node import difference
from sol_node import patch, spy_on

pytestmark = pytest.mark.usefixtures("inference")

MakeTiny = Callable[..., TinyModel]
STEPS = 3
# One block: sparse in steps 1 and 2 of 3.
SETTINGS = {"dense_steps": 1, "dense_layers": ""}
SPARSE = 2
# 3 latent frames of 10 x 10 patches: five blocks of tokens.
LATENT = {"width": 160, "height": 160, "length": 9, "steps": STEPS}


@pytest.mark.parametrize("when", ["before", "after"])
def test_torch_compile(comfy: ModuleType, tiny: MakeTiny, monkeypatch: pytest.MonkeyPatch, when: str) -> None:
    """As TorchCompileModel does it, but for the backend: Dynamo traces the model before any backend."""
    from comfy_api.torch_helpers import set_torch_compile_wrapper
    from comfy_extras.nodes_torch_compile import skip_torch_compile_dict
    from torch._dynamo.convert_frame import FRAME_COMPILE_COUNTER

    def compiled(patcher: Any) -> Any:
        clone = patcher.clone()
        set_torch_compile_wrapper(
            model=clone, backend="eager", options={"guard_filter_fn": skip_torch_compile_dict}
        )
        return clone

    model = tiny("wan", num_layers=1)
    source = comfy.load_unet(model.path)
    expected = comfy.sample(patch(comfy, source, **SETTINGS)[0], model, **LATENT)
    torch._dynamo.reset()
    FRAME_COMPILE_COUNTER.clear()
    spy = spy_on(monkeypatch)
    try:
        if when == "before":
            result = patch(comfy, compiled(source), **SETTINGS)[0]
        else:
            result = compiled(patch(comfy, source, **SETTINGS)[0])
        assert difference(comfy.sample(result, model, **LATENT), expected) < 1e-5
        assert spy.count == SPARSE
        once = FRAME_COMPILE_COUNTER.copy()
        assert sum(once.values()) > 0
        # Neither a step nor a sampling is another graph. (Core makes one for another number of steps.)
        comfy.sample(result, model, **LATENT)
        assert once == FRAME_COMPILE_COUNTER
    finally:
        torch._dynamo.reset()
