"""The choice of a kernel: each kind of call is asked about once, and no kind gets the answer of another."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from comfyui import inprocess

call = inprocess.pack_module("kernels_glue.attention.call")
routing = inprocess.pack_module("kernels_glue.attention.routing")
sol = inprocess.pack_module("kernels_glue.attention.sol")

MET = {"tokens": 100, "head_dim": 128, "dtype": torch.bfloat16, "device": "cpu"}


class Particular:
    """A kernel that takes one kind of tensors and options, and remembers what it was asked."""

    min_tokens = 0
    exact_queries = True

    def __init__(self, name: str = "particular"):
        self.name = name
        self.asked: list[str] = []

    def missing(self, device: torch.device) -> str:
        return ""

    def unfit(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> str:
        self.asked.append("unfit")
        found = {"tokens": q.shape[1], "head_dim": q.shape[3], "dtype": q.dtype, "device": q.device.type}
        return ", ".join(f"{name} {value}" for name, value in found.items() if value != MET[name])

    def unsupported(self, options: Any) -> str:
        self.asked.append("unsupported")
        return f"token_aug {options.token_aug}" if options.token_aug else ""


def call_of(*, tokens: int, head_dim: int, dtype: torch.dtype, device: str) -> Any:
    q = torch.empty((1, 2, tokens, head_dim), dtype=dtype, device=device)
    return call.read_call(q, q, q, 2, skip_reshape=True)


def plain(provider: Any, **options: Any) -> Any:
    return sol.SolOptions(1.0, 0.1, **options)


@pytest.mark.parametrize(
    ("name", "value"),
    [("head_dim", 64), ("tokens", 101), ("dtype", torch.float32), ("device", "meta")],
)
@pytest.mark.parametrize("first", ["taken", "refused"])
def test_calls_of_two_kinds_in_turn(name: str, value: Any, first: str) -> None:
    kernel = Particular()
    router = routing.Router([kernel], 0)
    good, bad = call_of(**MET), call_of(**{**MET, name: value})
    for one in [good, bad] * 2 if first == "taken" else [bad, good] * 2:
        chosen = router.choose(one, plain)
        if one is good:
            assert chosen == (kernel, plain(kernel))
        else:
            assert chosen == routing.Reason(f"particular: {name} {value}")
    assert (kernel.asked.count("unfit"), kernel.asked.count("unsupported")) == (2, 1)


def test_calls_with_two_options_in_turn() -> None:
    kernel = Particular()
    router = routing.Router([kernel], 0)
    good = call_of(**MET)
    for _ in range(2):
        assert router.choose(good, plain) == (kernel, plain(kernel))
        chosen = router.choose(good, lambda provider: plain(provider, token_aug=64))
        assert chosen == routing.Reason("particular: token_aug 64")
    assert (kernel.asked.count("unfit"), kernel.asked.count("unsupported")) == (1, 2)


def test_two_kernels_answer_for_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    never, always = Particular("never"), Particular("always")
    monkeypatch.setattr(never, "unfit", lambda q, k, v: "no")
    router = routing.Router([never, always], 0)
    for _ in range(2):
        assert router.choose(call_of(**MET), plain) == (always, plain(always))
