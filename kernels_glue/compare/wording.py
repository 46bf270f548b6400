"""How numbers of a comparison read. Pure."""

from __future__ import annotations

import math

from .results import FinalScore


def decibels(psnr: float) -> str:
    """A PSNR: `34.21 dB`; equal results and those without a PSNR in words."""
    if math.isnan(psnr):
        return "not defined"
    return f"{psnr:.2f} dB" if math.isfinite(psnr) else "infinite (equal)"


def ratio(value: float) -> str:
    """SSIM, cosine: four decimals, never rounded up to a perfect 1."""
    if math.isnan(value):
        return "not defined"
    text = f"{value:.4f}"
    return "> 0.9999" if value < 1 and float(text) == 1 else text


def relative(error: float) -> str:
    """A relative error: `3.1%`, small ones with two digits that count."""
    if not math.isfinite(error):
        return "not defined" if math.isnan(error) else "infinite"
    return f"{error:.1%}" if error >= 0.00995 or not error else f"{error * 100:.2g}%"


def scores(final: FinalScore) -> str:
    """The scores of the results."""
    listed = [f"PSNR {decibels(final.psnr)}", f"SSIM {ratio(final.ssim)}"]
    if final.lpips is not None:
        listed.append(f"LPIPS {final.lpips:.4f}")
    return f"{', '.join(listed)} ({'images' if final.images else 'latents'})"


def speed(seconds: float, reference: float) -> str:
    """How fast a step is beside the reference's, "" where one took no time."""
    if min(seconds, reference) <= 0:
        return ""
    return (
        f"{reference / seconds:.2f}x as fast"
        if reference >= seconds
        else f"{seconds / reference:.2f}x as long"
    )
