"""Layerwise Offload: block weights stream from host memory within a VRAM budget."""
