"""Benchmark of diffusion language models: an lm-eval adapter over the engine, with costs beside accuracy."""
