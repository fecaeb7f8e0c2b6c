"""The process that grades answers to public prompts for the guard; never the guard's own, which holds the keys.

    text verifiers   a child that can be killed (`fedsilo.grading.worker`)
    `code`           the same child behind walls of rung `namespaces`: no network, none of the site's files, no key, no
                     data, no model. In there each program runs in the sandbox of `fedsilo.grading.code_sandbox`, so
                     there are two walls between a program and this site. The answers to a public prompt come from
                     the models of other silos too: such a program is a stranger's (T14, T22).

The guard takes nine bytes an answer from it, and gives the answers of one silo to one step, and all answers of one
message, no longer than their budget (`fedsilo.grading.answers`), whatever the verifier. An answer of which it says
nothing in time, or something else than a verdict, is dropped; where it cannot be built the silo does not start.
Programs run only where the policy says so for this public set, and the charter as well, where there is one.
What this does not stop: faults of the kernel that both walls rest on; a test program of the agreed public set that is
itself hostile decides what is right; answers that take all their time make a message late.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fedsilo.grading.own_verifiers import find_verifier
from fedsilo.grading.worker import GradingProcess
from fedsilo.protocol.errors import UsageError
from silo.config import SiloConfig
from silo.guard import isolation
from silo.guard.site import never_shown


def public_grader(config: SiloConfig) -> GradingProcess:
    """Not started for text verifiers; for one that runs programs, started and tried.

    Raises:
        UsageError: the walls or the sandbox cannot be built here, or a path that is needed inside would show a key.
        OperationError: the process does not start.
    """
    verifier = config.data.public.verifier
    if not find_verifier(verifier).executes:
        return GradingProcess(verifier)
    if why := isolation.rung_trial("namespaces"):
        raise UsageError(
            f"data.public.verifier {verifier!r} runs programs of other silos' models, and this machine builds no walls "
            f"of rung namespaces for them: {why}",
            hint="`fedsilo doctor` lists the rungs; or use a verifier that runs nothing",
            code="NO_SANDBOX",
        )
    never = never_shown(config)

    def launch(arguments: Sequence[str], environment: Mapping[str, str]) -> isolation.WalledProcess:
        return isolation.launch_over_pipes(arguments, env=environment, never=never)

    process = GradingProcess(verifier, runs_programs=True, launch=launch)
    try:
        process.wait_ready()
    except BaseException:
        process.close()
        raise
    return process
