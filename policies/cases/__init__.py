"""Test cases of a policy: YAML that a security officer writes, real messages, and what the policy says of them.

    format.py   bytes of a file in, checked cases out
    needs.py    what a case takes of a policy, and which cases are not for it
    build.py    a case becomes a message, what the measuring party knows, and what was let out before
    values.py   tensors and answers of a given size
    judge.py    decisions, and which rules and limits the cases have shown passing and failing
    loosen.py   the policy with one limit loosened, for each limit

What cases do not show: what the guard does beside the decision (BEYOND_MESSAGES in loosen.py names those limits).
"""

from __future__ import annotations
