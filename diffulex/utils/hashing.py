"""Chained digests of KV pages: equal digests mean equal model, rules and token prefix."""

from __future__ import annotations

import hashlib

DIGEST_BYTES = 16


def root_digest(*facts: str) -> bytes:
    """Digest that a chain starts from: everything besides tokens that changes the KV of a page."""
    state = hashlib.blake2b(digest_size=DIGEST_BYTES)
    for fact in facts:
        data = fact.encode()
        state.update(len(data).to_bytes(4, "little"))
        state.update(data)
    return state.digest()


def page_digest(parent: bytes, token_bytes: bytes) -> bytes:
    """128-bit digest of one page of token ids behind the prefix that `parent` stands for."""
    return hashlib.blake2b(parent + token_bytes, digest_size=DIGEST_BYTES).digest()
