"""Batches, attention metadata and runner steps of block strategies."""
