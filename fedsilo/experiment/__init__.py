"""Experiments: many federations, each in one process of this machine, compared pairwise by seed."""
