"""Building blocks without torch models and without engine: registries, devices, checkpoints, output."""
