"""How `fa` chooses by timing, and the file that keeps the timings. Durations are made up by a clock."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from comfyui import inprocess
from dense_checks import call_of, exact, qkv

fa = inprocess.pack_module("kernels_glue.attention.dense.fa")
sdpa = inprocess.pack_module("kernels_glue.attention.dense.sdpa")
measured = inprocess.pack_module("kernels_glue.attention.measured")
timings = inprocess.pack_module("kernels_glue.attention.timings")
Candidate = inprocess.pack_module("kernels_glue.attention.dense.candidate").Candidate

KEY = timings.TimingKey.of("cpu", "2.9", "bfloat16", 128, 30000, 32768)
TIMING = timings.Timing("a", ("a", "b", "c"), {"a": 52.63, "b": 84.1}, {"c": "RuntimeError: no"})


class Bench:
    """Stand-in kernels that compute right, and a clock that only they move."""

    def __init__(self, path: Path):
        self.path = path
        self.now = 0.0
        self.runs: list[tuple[str, Any]] = []
        self.timed = 0

    def kernel(
        self,
        name: str,
        ms: float,
        *,
        unfit: Callable[[Any], str] = lambda call: "",
        missing: str = "",
        compute: Callable[[Any], torch.Tensor] = sdpa.plain,
    ) -> Any:
        def run(call: Any) -> torch.Tensor:
            self.runs.append((name, call))
            self.now += ms
            return compute(call)

        return Candidate(name, lambda device: missing, unfit, run)

    def milliseconds(self, function: Callable[[], torch.Tensor], device: torch.device) -> float:
        self.timed += 1
        before = self.now
        function()
        return self.now - before

    def process(self, *kernels: Any) -> Any:
        """A backend as a new process has it, with the same file."""
        return fa.FaBackend(kernels, timings.TimingStore(self.path), self.milliseconds)

    def stored(self) -> dict[str, Any]:
        return json.loads(self.path.read_text())["timings"]


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path / "kitchen_sol" / "timings.json")


def call(rows: int = 33, keys: int | None = None, **others: Any) -> Any:
    return call_of(*qkv(1, 2, rows, 16, keys=keys, **others))


def fails(message: str = "no kernel image", kind: type[Exception] = RuntimeError) -> Callable[[Any], Any]:
    def compute(call: Any) -> torch.Tensor:
        raise kind(message)

    return compute


# --- the choice ---------------------------------------------------------------------------------


def test_the_fastest_kernel_is_used_and_the_next_process_does_not_time(bench: Bench) -> None:
    kernels = [bench.kernel("slow", 3), bench.kernel("fast", 1), bench.kernel("all", 2)]
    first = bench.process(*kernels)
    result = first.run(call())
    assert result.kernel == "fast"
    torch.testing.assert_close(result.out, exact(call().q, call().k, call().v).float(), rtol=1e-5, atol=1e-5)
    assert bench.timed == 3
    first.run(call())
    assert bench.process(*kernels).run(call()).kernel == "fast"
    assert bench.timed == 3
    ((key, entry),) = bench.stored().items()
    assert entry == {
        "chosen": "fast",
        "candidates": ["all", "fast", "slow"],
        "ms": {"slow": 3, "fast": 1, "all": 2},
    }
    assert key == f"cpu | torch {torch.__version__} | float32 | head_dim 16 | 64 queries | 64 keys"


def test_the_stored_choice_counts_and_not_a_new_measurement(bench: Bench) -> None:
    bench.process(bench.kernel("a", 1), bench.kernel("b", 2)).run(call())
    assert bench.process(bench.kernel("a", 5), bench.kernel("b", 2)).run(call()).kernel == "a"


def test_a_choice_that_was_edited_by_hand_counts(bench: Bench) -> None:
    kernels = [bench.kernel("a", 1), bench.kernel("b", 2)]
    bench.process(*kernels).run(call())
    bench.path.write_text(bench.path.read_text().replace('"chosen": "a"', '"chosen": "b"'))
    assert bench.process(*kernels).run(call()).kernel == "b"


def test_lengths_are_rounded_up_to_powers_of_two(bench: Bench) -> None:
    backend = bench.process(bench.kernel("a", 1), bench.kernel("b", 2))
    for rows, keys, timed in [
        (65, 65, 2),
        (128, 100, 2),
        (129, 128, 4),
        (128, 129, 6),
        (256, 65, 6),
        (64, 128, 8),
    ]:
        backend.run(call(rows, keys))
        assert bench.timed == timed, (rows, keys)


def test_each_dtype_and_head_dim_is_timed(bench: Bench) -> None:
    backend = bench.process(bench.kernel("a", 1), bench.kernel("b", 2))
    backend.run(call())
    backend.run(call(dtype=torch.bfloat16))
    backend.run(call_of(*qkv(1, 2, 33, 24)))
    assert bench.timed == 6
    assert len(bench.stored()) == 3


def test_nothing_is_timed_while_a_graph_is_captured(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    capturing = [True]
    monkeypatch.setattr(measured, "_capturing", lambda device: capturing[0])
    backend = bench.process(bench.kernel("fast", 1), bench.kernel("all", 2))
    on_gpu = call()
    assert backend.run(on_gpu).kernel == "all"  # the last one takes everything
    assert [name for name, _ in bench.runs] == ["all"] and bench.timed == 0 and not bench.path.exists()
    capturing[0] = False
    assert backend.run(on_gpu).kernel == "fast" and bench.timed == 2
    capturing[0] = True  # what was timed before holds in a graph, too
    assert backend.run(on_gpu).kernel == "fast" and bench.timed == 2


def test_one_kernel_or_a_mask_needs_no_timing(bench: Bench) -> None:
    kernels = [bench.kernel("gone", 1, missing="not here"), bench.kernel("all", 2)]
    assert bench.process(*kernels).run(call()).kernel == "all"
    masked = call_of(*qkv(1, 2, 9, 16), torch.ones(9, 9, dtype=torch.bool))
    backend = bench.process(bench.kernel("fast", 1), bench.kernel("all", 2))
    assert backend.run(masked).kernel == "all"
    assert backend.timing_text(masked) == ""
    assert bench.timed == 0
    assert not bench.path.exists()


def test_timing_uses_views_of_one_sample_and_few_heads(bench: Bench) -> None:
    q, k, v = qkv(2, 24, 10, 8, key_heads=6)
    bench.process(bench.kernel("a", 1), bench.kernel("b", 2)).run(call_of(q, k, v, enable_gqa=True))
    *timed, (_, real) = bench.runs
    assert real.q.shape == q.shape
    for _, seen in timed:
        assert seen.q.shape == (1, 8, 10, 8)
        assert seen.k.shape == seen.v.shape == (1, 2, 10, 8)
        assert [t.data_ptr() for t in (seen.q, seen.k, seen.v)] == [t.data_ptr() for t in (q, k, v)]


@pytest.mark.parametrize(("heads", "key_heads", "timed"), [(2, 2, (2, 2)), (32, 2, (8, 1)), (9, 3, (6, 2))])
def test_timed_heads_stay_in_groups(bench: Bench, heads: int, key_heads: int, timed: tuple[int, int]) -> None:
    q, k, v = qkv(1, heads, 4, 8, key_heads=key_heads)
    bench.process(bench.kernel("a", 1), bench.kernel("b", 2)).run(call_of(q, k, v, enable_gqa=True))
    seen = bench.runs[0][1]
    assert (seen.q.shape[1], seen.k.shape[1]) == timed


def test_a_kernel_that_raises_is_recorded_and_never_used(bench: Bench) -> None:
    kernels = [bench.kernel("broken", 0.1, compute=fails()), bench.kernel("all", 2)]
    assert bench.process(*kernels).run(call()).kernel == "all"
    backend = bench.process(*kernels)
    assert backend.run(call()).kernel == "all"
    assert bench.timed == 1
    (entry,) = bench.stored().values()
    assert entry["errors"] == {"broken": "RuntimeError: no kernel image"}
    assert backend.timing_text(call()) == (
        "fa at 64 tokens: all 2 ms, broken failed (RuntimeError: no kernel image)"
    )


@pytest.mark.parametrize(
    "compute",
    [
        lambda c: sdpa.plain(c) * 1.2,
        lambda c: sdpa.plain(c) * float("nan"),
        lambda c: sdpa.plain(c)[:, :, :-1],
    ],
    ids=["scaled", "nan", "shape"],
)
def test_a_kernel_with_wrong_numbers_is_never_used(bench: Bench, compute: Callable[[Any], Any]) -> None:
    backend = bench.process(bench.kernel("wrong", 0.1, compute=compute), bench.kernel("all", 2))
    assert backend.run(call()).kernel == "all"
    assert "wrong" in bench.stored().popitem()[1]["errors"]["wrong"]


def test_broken_input_says_nothing_about_the_kernels(bench: Bench) -> None:
    q, k, v = qkv(1, 2, 33, 16)
    v[:] = float("nan")
    assert (
        bench.process(bench.kernel("fast", 1), bench.kernel("all", 2)).run(call_of(q, k, v)).kernel == "fast"
    )


@pytest.mark.parametrize(
    ("kind", "message"), [(torch.cuda.OutOfMemoryError, "full"), (RuntimeError, "CUDA error: out of memory")]
)
def test_out_of_memory_leaves_no_half_entry(bench: Bench, kind: type[Exception], message: str) -> None:
    backend = bench.process(
        bench.kernel("a", 1), bench.kernel("b", 1, compute=fails(message, kind)), bench.kernel("all", 2)
    )
    with pytest.raises(kind, match=message):
        backend.run(call())
    assert not bench.path.exists()
    assert backend.timing_text(call()) == ""


@pytest.mark.parametrize("change", ["new", "gone"])
def test_a_timing_of_other_kernels_does_not_hold(bench: Bench, change: str) -> None:
    a, b, c = bench.kernel("a", 1), bench.kernel("b", 0.5), bench.kernel("c", 2)
    before, after = ([a, c], [a, b, c]) if change == "new" else ([a, b, c], [a, c])
    bench.process(*before).run(call())
    timed = bench.timed
    assert bench.process(*after).run(call()).kernel == ("b" if change == "new" else "a")
    assert bench.timed == timed + len(after)
    assert set(bench.stored().popitem()[1]["ms"]) == {kernel.name for kernel in after}


def test_calls_that_suit_different_kernels_do_not_time_each_other_out(bench: Bench) -> None:
    picky = bench.kernel("picky", 1, unfit=lambda c: "scale" if c.scale else "")
    other = bench.kernel("other", 2, unfit=lambda c: "" if c.scale else "no scale")
    backend = bench.process(picky, other, bench.kernel("all", 3))
    plain, scaled = call(), call_of(*qkv(1, 2, 33, 16), scale=0.5)
    for _ in range(3):
        assert backend.run(scaled).kernel == "other"
        assert backend.run(plain).kernel == "picky"
    assert bench.timed == 2 + 2


def test_a_deleted_file_is_timed_again(bench: Bench) -> None:
    kernels = [bench.kernel("a", 1), bench.kernel("b", 2)]
    bench.process(*kernels).run(call())
    bench.path.unlink()
    bench.process(*kernels).run(call())
    assert bench.timed == 4
    assert bench.path.exists()


def test_a_kernel_that_fails_only_at_full_size_is_left_alone(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    q, k, v = qkv(1, 16, 33, 16)

    def compute(call: Any) -> torch.Tensor:
        return sdpa.plain(call) if call.q.shape[1] <= 8 else fails("too many heads")(call)

    backend = bench.process(
        bench.kernel("small", 1, compute=compute), bench.kernel("b", 2), bench.kernel("all", 3)
    )
    with caplog.at_level(logging.WARNING):
        assert backend.run(call_of(q, k, v)).kernel == "b"
        assert backend.run(call_of(q, k, v)).kernel == "b"
    assert ["too many heads" in record.message for record in caplog.records] == [True]
    assert backend.run(call_of(q[:, :4], k[:, :4], v[:, :4], scale=0.1)).kernel == "b"


def test_out_of_memory_in_a_call_is_passed_on(bench: Bench) -> None:
    q, k, v = qkv(1, 16, 33, 16)

    def compute(call: Any) -> torch.Tensor:
        return sdpa.plain(call) if call.q.shape[1] <= 8 else fails("full", torch.cuda.OutOfMemoryError)(call)

    backend = bench.process(bench.kernel("a", 1, compute=compute), bench.kernel("all", 3))
    for _ in range(2):
        with pytest.raises(torch.cuda.OutOfMemoryError):
            backend.run(call_of(q, k, v))


# --- the file -----------------------------------------------------------------------------------


def test_a_timing_survives_a_round_trip(bench: Bench) -> None:
    timings.TimingStore(bench.path).put(KEY, TIMING)
    assert timings.TimingStore(bench.path).get(KEY) == TIMING
    assert os.listdir(bench.path.parent) == [bench.path.name]


def test_the_text_to_show() -> None:
    assert TIMING.text("fa", KEY) == "fa at 32768 tokens: a 52.6 ms, b 84.1 ms, c failed (RuntimeError: no)"
    cross = timings.TimingKey.of("cpu", "2.9", "bfloat16", 128, 1, 512)
    quick = timings.Timing("b", ("a", "b"), {"a": 0.1234, "b": 0.05})
    assert quick.text("fa", cross) == "fa at 1 x 512 tokens: b 0.05 ms, a 0.123 ms"


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b"null", b'{"timings": 3}', b'{"other": {}}', b"\xff\xfe\x00", b"[" * 100_000],
    ids=["empty", "cut", "list", "null", "number", "other", "binary", "deep"],
)
def test_a_broken_file_is_ignored_with_one_line_and_replaced(
    bench: Bench, caplog: pytest.LogCaptureFixture, content: bytes
) -> None:
    bench.path.parent.mkdir()
    bench.path.write_bytes(content)
    store = timings.TimingStore(bench.path)
    with caplog.at_level(logging.WARNING):
        assert store.get(KEY) is None
        store.put(KEY, TIMING)
        assert store.get(KEY) == TIMING
    assert len(caplog.records) == 1
    assert str(bench.path) in caplog.records[0].message
    assert timings.TimingStore(bench.path).get(KEY) == TIMING


@pytest.mark.parametrize(
    "entry",
    [
        {},
        [],
        None,
        {"chosen": "a", "candidates": ["a"], "ms": {}},
        {"chosen": "a", "candidates": ["a"], "ms": {"a": "x"}},
        {"chosen": "a", "candidates": ["a"], "ms": {"a": float("nan")}},
        {"chosen": "a", "candidates": None, "ms": {"a": 1}},
    ],
)
def test_a_broken_entry_counts_as_none(bench: Bench, entry: Any) -> None:
    other = timings.TimingKey.of("other", "2.9", "bfloat16", 128, 1, 1)
    timings.TimingStore(bench.path).put(other, TIMING)
    content = {"timings": bench.stored() | {str(KEY): entry}}
    bench.path.write_text(json.dumps(content))
    store = timings.TimingStore(bench.path)
    assert store.get(KEY) is None
    assert store.get(other) == TIMING


def test_an_unwritable_folder_costs_one_line(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    bench.path.parent.write_text("a file where the folder should be")
    backend = bench.process(bench.kernel("a", 1), bench.kernel("b", 2))
    with caplog.at_level(logging.WARNING):
        for rows in (10, 10, 100, 1000):
            assert backend.run(call(rows)).kernel == "a"
    assert bench.timed == 6
    assert len(caplog.records) == 1
    assert str(bench.path) in caplog.records[0].message


def test_two_processes_keep_each_others_timings(bench: Bench) -> None:
    one, two = timings.TimingStore(bench.path), timings.TimingStore(bench.path)
    other = timings.TimingKey.of("other", "2.9", "bfloat16", 128, 1, 1)
    assert one.get(KEY) is two.get(KEY) is None
    one.put(KEY, TIMING)
    two.put(other, TIMING)
    three = timings.TimingStore(bench.path)
    assert three.get(KEY) == three.get(other) == TIMING


def test_an_interrupted_write_leaves_the_old_file(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    store = timings.TimingStore(bench.path)
    store.put(KEY, TIMING)

    def interrupted(*args: Any, **kwargs: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(timings.json, "dump", interrupted)
    with pytest.raises(KeyboardInterrupt):
        store.put(timings.TimingKey.of("other", "2.9", "bfloat16", 128, 1, 1), TIMING)
    assert os.listdir(bench.path.parent) == [bench.path.name]
    assert timings.TimingStore(bench.path).get(KEY) == TIMING


def test_the_file_is_in_comfyuis_user_folder() -> None:
    import folder_paths

    expected = Path(folder_paths.get_user_directory()) / "kitchen_sol" / "attention_timings.json"
    assert timings.default_path("attention_timings") == expected
