"""Keyed randomness: a draw depends on its key only, never on the order of arrival.

Shared draws (public batches, donors) are keyed by the run seed. Private draws are keyed by HMAC-SHA-256 of a
site secret, so that a coordinator cannot search seeds.
"""

from __future__ import annotations

import hashlib
import hmac

import numpy as np

from fedsilo.protocol.codec import canonical_json

Key = str | int


def seed_of(run_seed: int, purpose: str, *key: Key) -> int:
    """128-bit seed of a shared draw."""
    return int.from_bytes(hashlib.sha256(canonical_json(["fedsilo", run_seed, purpose, *key])).digest()[:16], "big")


def private_seed_of(site_secret: bytes, run_seed: int, purpose: str, *key: Key) -> int:
    """128-bit seed of a draw that only this site can compute."""
    mac = hmac.new(site_secret, canonical_json(["fedsilo", run_seed, purpose, *key]), hashlib.sha256)
    return int.from_bytes(mac.digest()[:16], "big")


def generator(seed: int) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(seed))
