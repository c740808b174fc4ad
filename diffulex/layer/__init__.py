"""Layers that every model family is built from."""
