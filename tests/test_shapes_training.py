"""The shipped model's videos and its training, as far as a CPU goes: physics, captions, resuming, files."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from comfyui import inprocess
from comfyui.testnodes.shapes import (
    COLOURS,
    SHAPES,
    TEXT_WIDTH,
    Thing,
    caption_conditioning,
    embed,
    fold,
    parse_caption,
    unfold,
)
from safetensors import safe_open
from shapes_detector import look, shows

sys.path.append(str(Path(__file__).resolve().parent.parent / "tools"))

import shapes_model
import train_demo_model
from shapes.checking import found, sample
from shapes.files import read_checkpoint
from shapes.muon import StackedMuon, orthogonal
from shapes.training import PHASES, Bucket, Phase, Settings, Trainer
from shapes.videos import contexts, draw_scenes, move, render

CPU = torch.device("cpu")
SMALL = Settings(
    steps=40, warmup=2, dim=128, ffn_dim=128, layers=1, phases=(Phase(1.0, (Bucket(2, 16, 2, 1.0),)),)
)


def _scenes(count: int, seed: int = 0):
    return draw_scenes(count, torch.Generator().manual_seed(seed))


# --- videos -------------------------------------------------------------------------------------


def test_objects_stay_in_the_picture_and_apart_and_keep_their_energy():
    scenes = _scenes(256)
    path = move(scenes, 16)
    both = scenes.present[:, 1] > 0
    # An edge turns an object back within a quarter of a frame's way, 0.04 at the highest speed.
    assert ((path.abs() + scenes.reach[:, None, :, None]) < 1 + 0.05).all()
    gaps = (path[:, :, 0] - path[:, :, 1]).norm(dim=-1)[both]
    assert (gaps > scenes.reach[both].sum(-1)[:, None] - 0.1).all()
    steps = (path[:, 1:] - path[:, :-1]).norm(dim=-1)
    assert steps.max() < 0.16 * 2**0.5 + 0.01  # two equal masses can pass at most all their energy to one


def test_equal_masses_that_meet_head_on_swap_their_velocities():
    scenes = _scenes(1)
    scenes = replace(
        scenes,
        shape=torch.zeros(1, 2, dtype=torch.long),
        present=torch.ones(1, 2),
        radius=torch.full((1, 2), 0.3),
        position=torch.tensor([[[-0.35, 0.0], [0.35, 0.0]]]),
        velocity=torch.tensor([[[0.1, 0.0], [-0.05, 0.0]]]),
    )
    path = move(scenes, 5)
    last = path[0, -1] - path[0, -2]
    assert torch.allclose(last, torch.tensor([[-0.05, 0.0], [0.1, 0.0]]), atol=1e-6)


def test_the_same_generator_draws_the_same_video():
    one, other = (render(_scenes(3, seed=4), 4, 32, CPU) for _ in range(2))
    assert torch.equal(one, other)
    assert not torch.equal(one, render(_scenes(3, seed=5), 4, 32, CPU))


def test_the_detector_finds_what_is_there_and_nothing_else():
    scenes = _scenes(24, seed=5)
    videos = render(scenes, 8, 64, CPU).numpy()
    for index, video in enumerate(videos):
        caption = scenes.caption(index)
        found = [Thing(s, c) for s in SHAPES for c in COLOURS if shows(video, Thing(s, c))]
        assert sorted(map(str, found)) == sorted(map(str, caption))


def test_the_detector_wants_movement():
    video = render(_scenes(1, seed=5), 1, 64, CPU).numpy().repeat(8, axis=1)[0]
    thing = _scenes(1, seed=5).caption(0)[0]
    assert look(video[0], thing.colour).shape == thing.shape
    assert not shows(video, thing)


# --- captions and latents -----------------------------------------------------------------------


def test_folding_loses_nothing_and_leaves_four_channels_empty():
    video = torch.rand(2, 3, 8, 12, 3)
    latent = fold(video)
    assert latent.shape == (2, 16, 3, 4, 6)
    assert not latent[:, 12:].any()
    assert torch.allclose(unfold(latent), video, atol=1e-6)
    # The first three channels are the upper left pixel of each square.
    assert torch.allclose(latent[1, :3, 2, 1, 2], (video[1, 2, 2, 4] - 0.5) * 4)


def test_captions_are_read_and_told_apart():
    assert parse_caption("red circle, blue square") == (Thing("circle", "red"), Thing("square", "blue"))
    assert parse_caption("") == ()
    rows = torch.stack([embed((Thing(s, c),))[0] for s in SHAPES for c in COLOURS])
    likeness = torch.nn.functional.cosine_similarity(rows[:, None], rows[None], dim=-1)
    assert (likeness - torch.eye(12) < 0.6).all()  # a word in common is a half
    context, extra = caption_conditioning("red circle")[0]
    assert context.shape == (1, 2, TEXT_WIDTH) and extra == {}


@pytest.mark.parametrize("text", ["red", "red circle, blue square, green circle", "pink circle", "red cube"])
def test_captions_that_were_not_taught_are_refused(text):
    with pytest.raises(ValueError):
        parse_caption(text)


def test_training_gets_the_captions_of_its_videos():
    scenes = _scenes(64)
    text = contexts(scenes, CPU)
    for index in range(64):
        told = scenes.caption(index) if scenes.captioned[index] else ()
        assert torch.equal(text[index], embed(told))
    assert 1 <= int((~scenes.captioned).sum()) < 20


# --- training -----------------------------------------------------------------------------------


def test_muon_takes_the_steps_of_torchs():
    shapes = [(32, 32), (64, 32), (32, 32), (32, 64)]
    start = [torch.randn(shape, generator=torch.Generator().manual_seed(1)) for shape in shapes]
    ours, theirs = ([p.clone().requires_grad_() for p in start] for _ in range(2))
    rate = torch.tensor(1e-2)
    muon = StackedMuon(ours, rate, weight_decay=0.1)
    other = torch.optim.Muon(theirs, lr=1e-2, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    generator = torch.Generator().manual_seed(2)
    for _ in range(3):
        for a, b in zip(ours, theirs, strict=True):
            a.grad = torch.randn(a.shape, generator=generator)
            b.grad = a.grad.clone()
        muon.step()
        other.step()
    for a, b, first in zip(ours, theirs, start, strict=True):
        moved = (b - first).norm()
        assert moved > 0.1
        # Both iterate in bf16, in another order.
        assert (a - b).norm() < 0.05 * moved


def test_orthogonal_matrices_have_singular_values_near_one():
    matrices = torch.randn(3, 48, 96, generator=torch.Generator().manual_seed(0))
    for values in torch.linalg.svdvals(orthogonal(matrices)):
        assert values.min() > 0.5 and values.max() < 1.4
    # Without bf16 and iterations: the polar factor has the same singular vectors.
    u, _, vh = torch.linalg.svd(matrices, full_matrices=False)
    likeness = torch.nn.functional.cosine_similarity((u @ vh).flatten(1), orthogonal(matrices).flatten(1))
    assert (likeness > 0.97).all()


def test_a_resumed_training_goes_on_as_if_it_had_not_stopped(tmp_path):
    whole = Trainer(SMALL, CPU)
    whole.run(10)
    first = Trainer(SMALL, CPU)
    first.run(7)
    second = Trainer(SMALL, CPU)
    torch.save(first.state(), tmp_path / "state.pt")
    second.load_state(read_checkpoint(tmp_path / "state.pt"))
    second.run(10)
    assert torch.equal(torch.stack(whole.losses), torch.stack(second.losses))
    for a, b in zip(whole.model.state_dict().values(), second.model.state_dict().values(), strict=True):
        assert torch.equal(a, b)


def test_another_seed_is_another_training():
    one, other = (Trainer(replace(SMALL, seed=seed), CPU) for seed in (0, 1))
    one.run(2)
    other.run(2)
    assert one.losses[0] != other.losses[0]


def test_a_checkpoint_of_other_settings_is_refused():
    state = Trainer(SMALL, CPU).state()
    with pytest.raises(ValueError, match="learning_rate"):
        Trainer(replace(SMALL, learning_rate=1.0), CPU).load_state(state)


def test_a_file_that_is_no_checkpoint_is_refused(tmp_path):
    path = tmp_path / "bad.pt"
    path.write_bytes(b"nothing")
    with pytest.raises(ValueError, match="no checkpoint"):
        read_checkpoint(path)


def test_training_learns():
    trainer = Trainer(replace(SMALL, steps=40, warmup=10), CPU)
    trainer.run(40)
    losses = torch.stack(trainer.losses)
    assert losses[-10:].mean() < 0.8 * losses[:5].mean()


def _knowing(clean):
    """The velocity of a model that knows which video it is asked for."""
    return lambda latent, sigma, text: (latent - clean) / sigma[:, None, None, None, None]


def test_checking_counts_what_the_samples_show():
    """A model that draws one caption's video whatever it is asked for is right as often as that is asked."""
    scenes = _scenes(400, seed=6)
    wanted = parse_caption(shapes_model.cases(1)[0].caption)
    index = next(n for n in range(400) if scenes.caption(n) == wanted)
    clean = fold(render(scenes, 8, 64, CPU))[index : index + 1]
    samples = sample(_knowing(clean), embed(wanted)[None], steps=4, shift=8.0)
    assert torch.allclose(samples, unfold(clean), atol=1e-4)
    shares = found(_knowing(clean), CPU, 12, steps=4, shift=3.0)
    shape = wanted[0].shape
    assert shares == {"all": 1 / 12, **{name: 0.25 * (name == shape) for name in SHAPES}}


def test_a_single_picture_needs_no_movement():
    scenes = _scenes(400, seed=6)
    wanted = parse_caption(shapes_model.cases(1)[0].caption)
    index = next(n for n in range(400) if scenes.caption(n) == wanted)
    still = fold(render(scenes, 1, 64, CPU))[index : index + 1]
    assert found(_knowing(still), CPU, 12, steps=4, shift=3.0, frames=1)["all"] == 1 / 12


def test_an_object_that_trembles_does_not_move():
    scenes = _scenes(50, seed=8)
    index = next(n for n in range(50) if len(scenes.caption(n)) == 1)
    (thing,) = scenes.caption(index)
    still = render(scenes, 1, 64, CPU)[index, 0]
    trembling = torch.stack([still.roll(shift, dims=1) for shift in (0, 1) * 4]).numpy()
    assert look(trembling[0], thing.colour).shape == thing.shape
    assert not shows(trembling, thing)


def test_checking_finds_nothing_in_noise():
    noise = found(lambda latent, sigma, text: torch.zeros_like(latent), CPU, 12, steps=2, shift=8.0)
    assert set(noise.values()) == {0.0}


def test_the_learning_rate_rises_and_falls():
    settings = Settings(steps=1000, warmup=100, learning_rate=1.0)
    assert settings.rate_at(0) == pytest.approx(0.01)
    assert settings.rate_at(99) == 1.0
    assert settings.rate_at(500) == 1.0
    assert settings.rate_at(750) == pytest.approx(0.5)
    assert settings.rate_at(999) == pytest.approx(0.002)


def test_the_phases_cover_the_training_in_usual_sizes():
    settings = Settings(steps=100)
    assert settings.buckets_at(0) == PHASES[0].buckets
    assert settings.buckets_at(99) == PHASES[-1].buckets
    for phase in PHASES:
        assert sum(bucket.share for bucket in phase.buckets) == pytest.approx(1)
    assert {bucket.tokens for bucket in PHASES[-1].buckets} == {2048, 4608, 8192, 16384}


def test_the_command_writes_a_model_that_comfyui_loads_as_wan(tmp_path, capsys):
    path = tmp_path / "model.safetensors"
    assert (
        train_demo_model.main(["--out", str(path), "--stop-at", "3", "--seed", "5", "--check", "1"], SMALL)
        == 0
    )
    assert "step 3, 8 frames, 8 Euler steps, shift 8: all 0%, circle 0%" in capsys.readouterr().out
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
        assert {file.get_tensor(key).dtype for key in file.keys()} == {torch.bfloat16}  # noqa: SIM118
    assert metadata["seed"] == "5" and metadata["steps"] == "3"
    assert (
        metadata["command"] == f"python tools/dev.py train --out {path.name} --stop-at 3 --seed 5 --check 1"
    )
    losses = path.with_suffix(".loss.csv").read_text(encoding="utf-8").splitlines()
    assert losses[0] == "step,loss" and len(losses) == 4
    patcher = inprocess.load_unet(path)
    assert type(patcher.model).__name__ == "WAN21"
    assert len(patcher.model.diffusion_model.blocks) == SMALL.layers


def test_the_command_resumes(tmp_path):
    whole, half, rest = (tmp_path / f"{name}.safetensors" for name in ("whole", "half", "rest"))
    checkpoint = tmp_path / "state.pt"
    train_demo_model.main(["--out", str(whole), "--stop-at", "6"], SMALL)
    train_demo_model.main(["--out", str(half), "--stop-at", "3", "--checkpoint", str(checkpoint)], SMALL)
    train_demo_model.main(["--out", str(rest), "--stop-at", "6", "--resume", str(checkpoint)], SMALL)
    assert whole.with_suffix(".loss.csv").read_text() == rest.with_suffix(".loss.csv").read_text()


@pytest.fixture
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.gpu
@pytest.mark.usefixtures("deterministic")
def test_a_recorded_training_step_is_the_plain_one() -> None:
    recorded, plain = (Trainer(SMALL, torch.device("cuda")) for _ in range(2))
    plain._update = plain._step
    for trainer in (recorded, plain):
        trainer.run(12)
    assert torch.equal(torch.stack(recorded.losses), torch.stack(plain.losses))
    for one, other in zip(recorded.model.parameters(), plain.model.parameters(), strict=True):
        assert torch.equal(one, other)
    another = Trainer(replace(SMALL, seed=1), torch.device("cuda"))
    another.run(1)
    assert another.losses[0] != plain.losses[0]


def test_the_second_run_repeats_the_shipped_one():
    """docs/training.md: a fifth of its steps, on another GPU of the same kind, to the last digit."""
    folder = Path(__file__).resolve().parent.parent / "docs" / "training"
    first, again = (
        (folder / name).read_text(encoding="utf-8").splitlines() for name in ("loss.csv", "loss_again.csv")
    )
    with safe_open(shapes_model.WEIGHTS, "pt") as file:
        metadata = file.metadata()
    steps = int(metadata["steps"])
    assert len(first) == 1 + steps == 1 + Settings().steps and int(metadata["seed"]) == Settings().seed
    assert len(again) == 1 + steps // 5
    assert again == first[: len(again)]
    last = [float(line.split(",")[1]) for line in first[-100:]]
    assert float(metadata["loss"]) == pytest.approx(sum(last) / 100, abs=1e-6)
    assert shapes_model.WEIGHTS.stat().st_size <= 12_000_000
