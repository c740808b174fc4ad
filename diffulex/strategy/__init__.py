"""Decoding strategies; importing this package registers the built-in ones."""

from diffulex.strategy import multi_bd

__all__ = ["multi_bd"]
