"""Names that core gives to things."""

# Before the key of every parameter of a diffusion model, in patches and in the state dict of the whole.
MODEL_PREFIX = "diffusion_model."
