"""Requests, scheduling, KV pages, stepping."""
