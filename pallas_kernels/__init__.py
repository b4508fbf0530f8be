"""GPU kernels for the step from logits to tokens, each beside its plain-jnp reference. Knows nothing of requests."""
