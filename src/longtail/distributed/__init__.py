"""Several processes that work together, started by torchrun."""
