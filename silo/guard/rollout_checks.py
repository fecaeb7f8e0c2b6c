"""The parts of `silo check` about a vLLM server: is vLLM there, and do its limits fit what it will be asked.

vLLM itself says so only when a run has begun, in a log file of the server.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path

from fedsilo.treaty.errors import OperationError, UsageError
from fedsilo.treaty.plan import Plan
from policies.load import Policy
from silo.config import SiloConfig, place_of
from silo.guard import isolation
from silo.guard.rollout_server import environment_of
from silo.guard.startup import never_shown
from silo.guard.supervisor import end_process_group

PAGE = "docs/how-to/vllm.md"
IMPORT_SECONDS = 300.0  # vLLM loads torch; from a cold disk that takes a minute or two
ANSWER_BYTES_MAX = 4096
LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # those of vLLM 0.32's --max-lora-rank
_IMPORT = """
import json
try:
    import vllm  # builds have distributions of other names, so the version is the package's own
    told = {"version": str(getattr(vllm, "__version__", "of no version"))}
except Exception as error:
    told = {"error": type(error).__name__ + ": " + str(error)[:300]}
print(json.dumps(told))
"""


def built_in(config: SiloConfig) -> bool:
    """Whether the guard starts vLLM with its own arguments."""
    rollout = config.rollout
    return rollout.chosen == "vllm" and rollout.launch == "child" and rollout.command is None


def vllm_there(config: SiloConfig) -> str:
    """Imports vLLM with the interpreter that the servers get, behind the walls they get.

    Raises:
        UsageError: it cannot be imported. OperationError: no process could be started.
    """
    python = config.rollout.python or Path(sys.executable)
    rung = isolation.best_rung() if config.trainer.isolation in ("auto", "container") else config.trainer.isolation
    hint = f"rollout.python: an interpreter that has vLLM; {PAGE}"
    with tempfile.TemporaryDirectory(prefix="fedsilo-check-") as scratch, tempfile.TemporaryFile() as answer:
        try:
            process = isolation.launch_walled(
                [str(python), "-P", "-c", _IMPORT],
                rung=rung,
                writable=[Path(scratch)],
                env=environment_of(config, Path(scratch)),
                never=never_shown(config),
                accelerators=config.trainer.devices != "cpu",
                stdout=answer,
                stderr=answer,
            )
        except (OSError, ValueError) as error:
            raise OperationError(f"{python} cannot be started: {error}", hint=hint, code="ROLLOUT_START") from error
        end_process_group(process, IMPORT_SECONDS)
        size = answer.seek(0, os.SEEK_END)
        answer.seek(max(size - ANSWER_BYTES_MAX, 0))
        said = answer.read().decode("utf-8", "replace").strip().rpartition("\n")[2]
    try:
        told = json.loads(said)
        found = told.get("version")
        why = str(told.get("error"))
    except (ValueError, AttributeError):
        found, why = None, f"it ended with status {process.returncode}: {said[:300] or 'no word'}"
    if found is None:
        place = place_of(config, "rollout.python")
        raise UsageError(f"{place}: {python} has no vLLM that can be imported: {why}", hint=hint, code="NOT_INSTALLED")
    return f"vLLM {str(found)[:40]} with {python}"


def limits(config: SiloConfig, context_tokens: int, policy: Policy, plan: Plan | None) -> str:
    """Whether the servers take the adapters and lengths of the open run, else of what the policy lets in.

    Raises:
        UsageError: they would not start, or a plan that is let in here could not be sampled; with the line.
    """
    rollout = config.rollout
    schemas = policy.file.lora_schemas.values()
    rank = plan.lora.rank if plan is not None else max((schema.rank for schema in schemas), default=1)
    if built_in(config):
        if rollout.max_lora_rank not in LORA_RANKS:
            known = ", ".join(map(str, LORA_RANKS))
            raise _wrong(config, "max_lora_rank", "is none that vLLM takes", f"one of {known}")
        if rollout.max_lora_rank < rank:
            least = next((each for each in LORA_RANKS if each >= rank), rank)
            raise _wrong(config, "max_lora_rank", f"is below the adapter's rank, {rank}", f"max_lora_rank: {least}")
        if rollout.max_model_tokens > context_tokens:
            context = f"is more than the model's context, {context_tokens}"
            raise _wrong(config, "max_model_tokens", context, f"max_model_tokens: {context_tokens} or less")
    wanted, whose = _tokens(policy, plan)
    if rollout.max_model_tokens < wanted:
        short = f"is less than {wanted} tokens of a prompt and its answer ({whose})"
        raise _wrong(config, "max_model_tokens", short, f"max_model_tokens: {wanted} or more")
    return f"rank {rank} of {rollout.max_lora_rank}, {wanted} of {rollout.max_model_tokens} tokens ({whose})"


def _tokens(policy: Policy, plan: Plan | None) -> tuple[int, str]:
    if plan is not None:
        return plan.rollout.max_prompt_tokens + plan.rollout.max_new_tokens, f"run {plan.run}"
    allowed = policy.file.ingress.run_plan
    # of prompts the policy says nothing: at least a token stands before an answer
    return (1 if allowed is None else allowed.max_new_tokens[1] + 1), "the longest answers that the policy lets in"


def _wrong(config: SiloConfig, key: str, what: str, hint: str) -> UsageError:
    value = getattr(config.rollout, key)
    place = place_of(config, f"rollout.{key}")
    return UsageError(f"{place}: rollout.{key}: {value} {what}", hint=f"{hint}; {PAGE}")
