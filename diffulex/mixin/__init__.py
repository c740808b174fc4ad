"""Behaviour that several strategies share, below the engine."""
