"""ComfyUI-Kitchen-Sol: run the largest diffusion transformers on ordinary cards.

Nothing heavy is imported here: kernels and their packages are loaded by the node that needs them.
"""

WEB_DIRECTORY = "./web"


async def comfy_entrypoint():
    """Called once by ComfyUI; returns the extension with the nodes of the pack."""
    from .nodes import KitchenSolExtension

    return KitchenSolExtension()


__all__ = ["WEB_DIRECTORY", "comfy_entrypoint"]
