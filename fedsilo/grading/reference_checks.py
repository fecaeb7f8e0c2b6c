"""Whether a reference answer can be compared with, for every verifier: a mixture's parts, and those of packages.

What a package brought is asked in a grading process, one for each such part, and never loaded here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

from fedsilo.grading import VERIFIERS, check_reference, mixture
from fedsilo.grading.verdict import VerdictCode
from fedsilo.grading.worker import GradingProcess

Check = Callable[[str], bool]


def our_parts_check(verifier: str) -> Check:
    """Asks FedSilo's own parts of a verifier alone; starts no process. Says yes for what only a package can say.

    Raises:
        UsageError: the name is none.
    """
    ours = [part for part in mixture.parse(verifier) if part.verifier in VERIFIERS]
    return lambda answer: all(check_reference(part.verifier, part.form or answer) for part in ours)


@contextmanager
def full_check(verifier: str) -> Iterator[Check]:
    """Asks every part. An own verifier that fails or hangs on a reference has not said that it is a bad one.

    Raises:
        UsageError: unknown, or not what a verifier must be. OperationError: no process can be started.
    """
    ours = our_parts_check(verifier)
    with ExitStack() as stack:
        brought = [
            stack.enter_context(GradingProcess(part.verifier))
            for part in mixture.parse(verifier)
            if part.verifier not in VERIFIERS
        ]
        for process in brought:
            process.wait_ready()

        def check(answer: str) -> bool:
            return ours(answer) and all(
                process.grade("", answer).code is not VerdictCode.BAD_REFERENCE for process in brought
            )

        yield check
