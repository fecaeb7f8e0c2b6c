"""Sizes that the trainer keeps to and that the guard's estimate of its memory counts with. Needs no torch."""

from __future__ import annotations

# Of a site's configuration, where it names none.
MICROBATCH_TOKENS = 16384  # of one training pass through the model
CACHE_BYTES = 2 << 30  # keys and values of the answers that are sampled together

# Numbers of one chunk of logits: 64 MiB in float32, so that [tokens, vocabulary] is never whole in memory.
LOGITS_MAX = 1 << 24
# Scores of one head that a part's attention may compute, padding included. Masks of as many numbers at most are held
# for a pass, 128 MiB in float32. A kernel that writes scores out holds them for every head, and until the backward pass
# for every layer.
SCORES_MAX = 1 << 25
