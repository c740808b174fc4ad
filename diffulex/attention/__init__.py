"""Paged attention: what a row may see, where its keys are, and the operations that read them."""
