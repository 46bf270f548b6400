"""Compare two models step by step: what a speed option costs in fidelity, time and memory."""
