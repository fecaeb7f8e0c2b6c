"""Recordings: what is in them, what is not, and playing them back by a hand clock."""

from __future__ import annotations
