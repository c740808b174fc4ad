"""What several tests build on: checkpoints, engines, fake models, reference loops."""
