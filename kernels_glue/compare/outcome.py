"""The results of samplings, as images where there is a VAE and as latents elsewhere."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ..failures import first_line
from .metrics import final, final_psnr, streams
from .results import FinalScore


@dataclass(frozen=True)
class Reference:
    """The result that others are compared with.

    Attributes:
        result: images [N, H, W, 3] or samples of a latent.
        vae: core's VAE where it is images, else None.
        remarks: why it is no images.
    """

    result: Any
    vae: Any = None
    remarks: tuple[str, ...] = ()

    def score(self, result: Any, lpips: bool) -> FinalScore:
        """How close another result of the same kind is."""
        return final(result, self.result, self.vae is not None, lpips)

    def psnr(self, latent: dict[str, Any]) -> float:
        """The PSNR of `score` for another LATENT, in dB, without the other scores, which take much longer."""
        result = latent["samples"] if self.vae is None else _decoded(self.vae, latent)
        return final_psnr(result, self.result, self.vae is not None)


def results_of(reference: dict[str, Any], model: dict[str, Any], vae: Any) -> tuple[Reference, Any]:
    """What is compared of two LATENTs: the reference's result, and the model's.

    A VAE that cannot decode both is left out with a remark: two samplings are done.
    """
    remarks: tuple[str, ...] = ()
    if vae is not None:
        try:
            return Reference(_decoded(vae, reference), vae), _decoded(vae, model)
        except Exception as error:  # whatever another kind of VAE says to such a latent
            remarks = (f"the VAE cannot decode the results, so latents are compared ({first_line(error)})",)
    return Reference(reference["samples"], None, remarks), model["samples"]


def broken(latent: dict[str, Any], result: Any, who: str) -> tuple[str, ...]:
    """A warning where a LATENT, or the result that was made of it, has values that are no numbers."""
    if not _finite(latent["samples"]):
        return (f"the result of the {who} has NaN or infinite values, so its scores mean nothing",)
    if not _finite(result):
        why = f"the VAE makes NaN or infinite values of the result of the {who}"
        return (f"{why}, so its scores mean nothing; without `vae`, latents are compared",)
    return ()


def _finite(samples: Any) -> bool:
    return all(torch.isfinite(part).all() for part in streams(samples))


def _decoded(vae: Any, latent: dict[str, Any]) -> torch.Tensor:
    """As core's node VAEDecode does it."""
    images = vae.decode(streams(latent["samples"])[0])
    return images.reshape(-1, *images.shape[-3:])
