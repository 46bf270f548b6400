"""Everything below the node schemas. Nothing in here imports `comfy_api`."""
