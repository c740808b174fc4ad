"""Sizes, ranks and collectives of a model that is spread over several processes."""
