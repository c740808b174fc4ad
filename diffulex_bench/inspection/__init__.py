"""``diffulex-bench inspect``: what a checkpoint folder holds and what it needs, without reading a weight."""
