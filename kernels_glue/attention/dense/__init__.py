"""The dense attention backends, by the name that the node's `dense_backend` option gives them."""

from __future__ import annotations

from .base import DenseBackend
from .fa import FaBackend
from .kitchen_int8 import KitchenInt8Backend
from .sage import SageBackend

BACKENDS: dict[str, DenseBackend] = {
    backend.name: backend for backend in (FaBackend(), SageBackend(), KitchenInt8Backend())
}
