"""The results of samplings, as images where there is a VAE and as latents elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from ..attention.failures import first_line
from .metrics import final
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

    @classmethod
    def of(cls, latent: dict[str, Any], vae: Any) -> Reference:
        """From core's LATENT; a VAE that cannot decode it is left out with a remark."""
        if vae is None:
            return cls(latent["samples"])
        try:
            return cls(_decoded(vae, latent), vae)
        except Exception as error:  # whatever another kind of VAE says to this latent: two samplings are done
            remark = f"the VAE cannot decode this latent, so latents are compared ({first_line(error)})"
            return cls(latent["samples"], None, (remark,))

    def score(self, latent: dict[str, Any], lpips: bool) -> FinalScore:
        """How close the result of another sampling is."""
        result = latent["samples"] if self.vae is None else _decoded(self.vae, latent)
        return final(result, self.result, self.vae is not None, lpips)


def broken(latent: dict[str, Any], who: str) -> Iterator[str]:
    """A remark where a result has values that are no numbers."""
    samples = latent["samples"]
    parts = samples.unbind() if samples.is_nested else [samples]
    if not all(torch.isfinite(part).all() for part in parts):
        yield f"the result of the {who} has NaN or infinite values, so its scores mean nothing"


def _decoded(vae: Any, latent: dict[str, Any]) -> torch.Tensor:
    """As core's node VAEDecode does it."""
    samples = latent["samples"]
    images = vae.decode(samples.unbind()[0] if samples.is_nested else samples)
    return images.reshape(-1, *images.shape[-3:])
