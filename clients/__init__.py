"""The client half of every method: local optimizers, the training loop, the NumPyClient and the diagnostics."""
