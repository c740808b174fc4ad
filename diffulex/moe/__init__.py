"""Mixture-of-experts layers: which experts a token goes to, how it gets there, what they compute."""
