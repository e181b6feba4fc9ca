"""Leases: conversations whose cache is kept for some time after an answer."""
