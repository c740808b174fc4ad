"""Attention metadata of `multi_bd`."""
