"""Sol sparse attention with a dense fallback: config -> schedule, layers, layouts -> routing -> override."""
