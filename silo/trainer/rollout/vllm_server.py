"""Rollouts by a vLLM server behind a unix socket: one for private prompts, one for public ones, or one for both.

Before anything is sampled the adapter that is trained is compared with the one that the server has. Where they differ
it is pushed: into a folder and under a name that never were before, since vLLM keys its caches by both; the one before
it is unloaded afterwards. Its name holds the adapter's digest, and every answer must name it. The base model is an
adapter of zeros: on vLLM's CPU build a base request that shares a batch with an adapter's is computed with that one.

Token ids go out and come back, never text. A prompt is one request with a seed of its own, drawn from its question's
first generator; vLLM gives the samples of a request the seeds that follow. So answers depend on (run, round, step,
prompt), but an answer is not the embedded engine's, and in bfloat16 it depends on who else is in the batch.

A server that goes away is waited for, since the guard starts it again; it gets the adapter anew, and what was not
answered is asked again with the same seeds. What this does not stop: a server that computes something else and gives it
the adapter's name (`silo.trainer.agreement` looks for that).

The folder that is pushed is one that peft and vLLM read: `adapter_config.json` and `adapter_model.safetensors`. It
appears under its name when it is whole, and is never written again: a server that caches by name and path would not see
that it changed.
"""

from __future__ import annotations

import contextlib
import logging
import re
import shutil
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedsilo.protocol.errors import OperationError
from silo.trainer.adapters import TrainedState
from silo.trainer.rollout.engine import PromptSource, Question, Rollout, RolloutPlace
from silo.unix_http import Answer, Call, ServerGone, ask

_log = logging.getLogger("fedsilo.trainer.rollout")

REQUESTS_TOGETHER = 256  # connections; vLLM queues what it cannot hold
ATTEMPTS_MAX = 4  # at one request, the server's deaths among them
CONTROL_SECONDS = 60.0  # to load or unload an adapter
SILENCE_SECONDS = 1800.0  # of one answer: the longest that a whole batch of rollouts may take
PAUSE_SECONDS = 0.2
SEED_BITS = 53  # a JSON reader may keep no more of a number
_PUSHED = re.compile(r"push-(\d{6,})-(.+)")


@dataclass(frozen=True)
class _Request:
    """Answers to one prompt that are drawn alike. samples: their places among the question's. seed None: greedily."""

    question: int
    prompt_ids: tuple[int, ...]
    samples: tuple[int, ...]
    seed: int | None


class VllmEngine:
    """The rollout engine that asks vLLM servers.

    Args:
        adapter: the one that is trained; what it computes when something is generated is what the servers get.
        place: of the servers.
        stop_ids: tokens that end an answer.
        vocabulary: tokens of the model; no prompt and no answer may hold another.

    Raises:
        OperationError: a server does not answer, or offers no adapters.
    """

    def __init__(
        self, adapter: TrainedState, place: RolloutPlace, *, stop_ids: Collection[int], vocabulary: int
    ) -> None:
        self._adapter = adapter
        self._stop_ids = frozenset(stop_ids)
        self._vocabulary = vocabulary
        private = _Server(place.private, place, "private")
        public = private if place.private == place.public else _Server(place.public, place, "public")
        self._servers: dict[PromptSource, _Server] = {"private": private, "public": public}
        self._shared = private is public
        self._source: PromptSource | None = None

    def use(self, source: PromptSource) -> None:
        """Send what comes to the server of this source. One that serves both is drained and its cache emptied first.

        Raises:
            OperationError: it cannot be drained or emptied; nothing of the other kind may then be sent there.
        """
        if self._shared and self._source != source:
            # the first time too: the server may have answered another trainer, one that died, for the other source
            self._source = None
            self._servers[source].empty()
        self._source = source

    def generate(
        self, questions: Sequence[Question], *, temperature: float, max_new_tokens: int
    ) -> list[tuple[Rollout, ...]]:
        """Answer as `RolloutEngine.generate` says.

        Raises:
            OperationError: a prompt is too long or holds what is no token of the model, the server fails again and
                again, or it answers something else than it was asked.
        """
        if self._source is None:
            raise OperationError("nobody said whose prompts come", code="BAD_TASK")
        server = self._servers[self._source]
        for question in questions:
            self._check_prompt(question.prompt_ids, max_new_tokens, server)
        requests = [each for place, question in enumerate(questions) for each in _requests_of(place, question)]
        bodies = {
            each: {
                "prompt": list(each.prompt_ids),
                "n": len(each.samples),
                "max_tokens": max_new_tokens,
                "temperature": 0.0 if each.seed is None else temperature,
                **({} if each.seed is None else {"seed": each.seed}),
                "top_p": 1.0,
                "top_k": 0,
                "min_p": 0.0,
                "repetition_penalty": 1.0,
                "ignore_eos": True,  # the model's own end is one of these where it has one
                "stop_token_ids": sorted(self._stop_ids),
                "add_special_tokens": False,
                "skip_special_tokens": False,
                "return_token_ids": True,
                "logprobs": 0,
            }
            for each in requests
        }
        rollouts: list[list[Rollout | None]] = [[None] * len(question.draws) for question in questions]
        for request, name, fields in server.complete(bodies, self._adapter):
            for sample, rollout in zip(request.samples, self._rollouts(request, name, fields), strict=True):
                rollouts[request.question][sample] = rollout
        return [tuple(each for each in row if each is not None) for row in rollouts]

    def rest(self) -> None:
        """Let the servers sleep where they can; the next `generate` wakes them."""
        for server in set(self._servers.values()):
            server.sleep()

    def close(self) -> None:
        """Leave no adapter behind. A server that is gone has none."""
        for server in set(self._servers.values()):
            with contextlib.suppress(OperationError, ServerGone):
                server.unload()

    def _check_prompt(self, ids: Sequence[int], max_new_tokens: int, server: _Server) -> None:
        longest = server.context_tokens()
        if len(ids) + max_new_tokens > longest:
            # vLLM would cut the answer short and call it too long
            raise OperationError(
                f"a prompt of {len(ids)} tokens and {max_new_tokens} new ones exceed the rollout server's {longest}",
                hint="raise rollout.max_model_tokens, or lower the plan's limits",
                code="BAD_TASK",
            )
        if not ids or not all(0 <= each < self._vocabulary for each in ids):
            raise OperationError("a prompt is empty, or holds what is no token of the model", code="BAD_TASK")

    def _rollouts(self, request: _Request, name: str, fields: Mapping[str, Any]) -> list[Rollout]:
        """Return what the server answered, if it answers what was asked. Raises OperationError."""
        try:
            if fields["model"] != name:
                raise OperationError(
                    f"the server answers as {str(fields['model'])[:40]!r}, asked was {name[:40]!r}",
                    code="STALE_ROLLOUT",
                )
            choices = sorted(fields["choices"], key=lambda choice: int(choice["index"]))
            if [choice["index"] for choice in choices] != list(range(len(request.samples))):
                raise ValueError("not as many answers as were asked for")
            return [self._rollout(request, choice, name) for choice in choices]
        except (KeyError, TypeError, ValueError) as error:
            raise OperationError(
                f"the rollout server's answer is not usable: {error}", code="ROLLOUT_FAILED"
            ) from error

    def _rollout(self, request: _Request, choice: Mapping[str, Any], name: str) -> Rollout:
        if tuple(choice["prompt_token_ids"]) != request.prompt_ids:
            raise ValueError("it is to another prompt")
        ids = tuple(int(each) for each in choice["token_ids"])
        logp = tuple(float(each) for each in choice["logprobs"]["token_logprobs"])
        finished = choice["finish_reason"] == "stop"
        if not all(0 <= each < self._vocabulary for each in ids) or not ids:
            raise ValueError("it is empty, or holds what is no token of the model")
        if len(logp) != len(ids):
            raise ValueError(f"it has {len(logp)} log-probabilities for {len(ids)} tokens")
        if finished != (ids[-1] in self._stop_ids) or self._stop_ids & set(ids[:-1]):
            raise ValueError("it does not end where it says")
        if choice["finish_reason"] not in ("stop", "length"):
            raise ValueError(f"it ended by {str(choice['finish_reason'])[:40]!r}")
        return Rollout(ids, finished, () if request.seed is None else logp, digest_in(name))


def digest_in(name: str) -> str:
    """Return the digest of the adapter that was pushed under this name; '' where the name is none of ours."""
    match = _PUSHED.fullmatch(name)
    return match[2] if match else ""


def _requests_of(place: int, question: Question) -> Iterator[_Request]:
    drawn = tuple(sample for sample, draw in enumerate(question.draws) if draw is not None)
    greedy = tuple(sample for sample, draw in enumerate(question.draws) if draw is None)
    if drawn:
        first = question.draws[drawn[0]]
        assert first is not None  # noqa: S101  # of `drawn`
        yield _Request(place, question.prompt_ids, drawn, int(first.integers(2**SEED_BITS)))
    for sample in greedy:
        yield _Request(place, question.prompt_ids, (sample,), None)


class _Server:
    """One server: its adapters, and the connection to it.

    Args:
        socket: its path.
        place: limits, and the folder of adapters.
        name: private or public, for messages and its part of the folder.
    """

    def __init__(self, socket: Path, place: RolloutPlace, name: str) -> None:
        self._socket = socket
        self._place = place
        self._name = name
        self._folder = place.adapters / name
        self._folder.mkdir(exist_ok=True, mode=0o755)
        self._loaded = ""  # the name under which it has the last adapter that was pushed
        self._pushes = 0
        self._context_tokens = 0
        self._can_sleep = place.sleep
        self._asleep = False
        self._meet()

    def context_tokens(self) -> int:
        return self._context_tokens

    # ---- requests ------------------------------------------------------------------------------------

    def complete(
        self, bodies: Mapping[_Request, Mapping[str, Any]], adapter: TrainedState
    ) -> Iterator[tuple[_Request, str, Mapping[str, Any]]]:
        """(request, name of the adapter asked for, answer), each request once. Raises OperationError."""
        left = list(bodies)
        attempts = dict.fromkeys(left, 0)
        while left:
            self._wake()
            name = self._push(adapter)
            batch, failed = left[:REQUESTS_TOGETHER], ""
            calls: list[tuple[_Request, Call]] = []
            try:
                for request in batch:
                    body = {"model": name, **bodies[request]}
                    calls.append(
                        (request, Call(self._socket, "/v1/completions", body, timeout_seconds=SILENCE_SECONDS))
                    )
            except ServerGone as error:
                failed = str(error)
            try:
                for request, call in calls:
                    try:
                        answer = call.answer()
                    except ServerGone as error:
                        failed = str(error)
                        continue
                    if answer.status == 200:
                        left.remove(request)
                        yield request, name, answer.fields
                    elif answer.status >= 500 or answer.status == 404:
                        failed = f"status {answer.status}: {answer.said}"
                    else:
                        raise OperationError(
                            f"the rollout server refuses a request ({answer.status}): {answer.said}",
                            code="ROLLOUT_FAILED",
                        )
            finally:
                for _, call in calls:
                    call.close()
            if failed:
                for request in batch:
                    attempts[request] += 1
                if max(attempts[request] for request in left) >= ATTEMPTS_MAX:
                    raise OperationError(f"the rollout server fails again and again: {failed}", code="ROLLOUT_FAILED")
                _log.warning("the rollout server for %s prompts failed: %s", self._name, failed)
                self._meet()

    def _ask(self, target: str, body: Any = None) -> Answer:
        """Ask as `ask` does; a server that goes away meanwhile is an error of this attempt. Raises OperationError."""
        try:
            return ask(self._socket, target, body, timeout_seconds=CONTROL_SECONDS)
        except ServerGone as error:
            raise OperationError(f"the rollout server went away: {error}", code="ROLLOUT_GONE") from error

    def _meet(self) -> None:
        """Wait for the server, and learn what it holds; adapters that are not in use are unloaded."""
        end = time.monotonic() + self._place.timeout_seconds
        while True:
            with contextlib.suppress(ServerGone):
                if ask(self._socket, "/health", timeout_seconds=CONTROL_SECONDS).status == 200:
                    answer = ask(self._socket, "/v1/models", timeout_seconds=CONTROL_SECONDS)
                    if answer.status == 200:
                        # one that a trainer put to sleep before it died still sleeps, and answers nothing of use
                        self._asleep = self._place.sleep and self._says_it_sleeps()
                        return self._learn(answer)
            if time.monotonic() > end:
                raise OperationError(
                    f"the rollout server at unix:{self._socket} does not answer",
                    hint="the guard starts it again where it started it; see logs/rollout_*.log in its state_dir",
                    code="ROLLOUT_GONE",
                )
            time.sleep(PAUSE_SECONDS)

    def _says_it_sleeps(self) -> bool:
        """Return True if the server says that it sleeps. Raises ServerGone."""
        answer = ask(self._socket, "/is_sleeping", timeout_seconds=CONTROL_SECONDS)
        return answer.status == 200 and answer.fields.get("is_sleeping") is True

    def _learn(self, answer: Answer) -> None:
        try:
            models = {str(each["id"]): each for each in answer.fields["data"]}
            self._context_tokens = min(
                int(each["max_model_len"]) for each in models.values() if each.get("max_model_len")
            )
        except (KeyError, TypeError, ValueError) as error:
            raise OperationError(
                f"the rollout server does not say what it serves: {error}", code="ROLLOUT_FAILED"
            ) from error
        ours = [name for name in models if _PUSHED.fullmatch(name)]
        if self._loaded not in ours:
            self._loaded = ""
        for name in ours:
            if name != self._loaded:  # of a trainer that is gone
                self._drop(name)
        folders = [each.name for each in self._folder.iterdir()]
        numbers = [int(match[1]) for each in (*ours, *folders) if (match := _PUSHED.fullmatch(each))]
        self._pushes = max(self._pushes, *numbers, 0)
        for name in set(folders) - set(ours):
            shutil.rmtree(self._folder / name, ignore_errors=True)

    # ---- adapters ------------------------------------------------------------------------------------

    def _push(self, adapter: TrainedState) -> str:
        """Make the server hold this adapter as it is; its name there. Raises OperationError."""
        digest = adapter.name()
        if digest_in(self._loaded) == digest:
            return self._loaded
        for attempt in range(ATTEMPTS_MAX):
            self._pushes += 1
            name = f"push-{self._pushes:06d}-{digest}"
            try:
                adapter.write_for_servers(self._folder / name)
            except OSError as error:
                raise OperationError(f"the adapter cannot be written: {error}", code="ROLLOUT_FAILED") from error
            try:
                answer = self._ask("/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(self._folder / name)})
            except OperationError:
                answer = Answer(503, "it went away")
            if answer.status == 200:
                before, self._loaded = self._loaded, name
                if before:
                    self._drop(before)
                return name
            if answer.status < 500 or attempt == ATTEMPTS_MAX - 1:
                raise OperationError(
                    f"the rollout server does not take the adapter ({answer.status}): {answer.said}",
                    hint="rollout.max_lora_rank must be at least the plan's rank",
                    code="ROLLOUT_FAILED",
                )
            _log.warning("the rollout server for %s prompts did not load an adapter: %s", self._name, answer.said)
            self._meet()
        raise AssertionError  # the last attempt returns or raises

    def _drop(self, name: str) -> None:
        """Unload, then delete: a server that had put the adapter aside reads the folder again, and dies without it."""
        with contextlib.suppress(OperationError):
            if self._ask("/v1/unload_lora_adapter", {"lora_name": name}).status in (200, 404):
                shutil.rmtree(self._folder / name, ignore_errors=True)

    def unload(self) -> None:
        if self._loaded:
            self._drop(self._loaded)
            self._loaded = ""

    # ---- between the kinds of prompts, and between the phases ----------------------------------------

    def empty(self) -> None:
        """Wait until nothing runs, and forget every cached prefix: vLLM says no while a request still holds a block.

        Raises:
            OperationError: it does not do so in time, or does not offer it.
        """
        self._wake()
        end = time.monotonic() + CONTROL_SECONDS
        while True:
            try:
                answer = self._ask("/reset_prefix_cache", {})
            except OperationError:
                self._meet()  # one that was started again has an empty cache; still it is asked
                answer = Answer(503, "it went away")
            if answer.status == 200 and answer.fields.get("success") is True:
                return
            if answer.status in (404, 405) or time.monotonic() > end:
                raise OperationError(
                    "private and public prompts share a rollout server whose prefix cache cannot be emptied",
                    hint="give them two servers: rollout.public_url; or VLLM_SERVER_DEV_MODE=1 where you start it",
                    code="ROLLOUT_SHARED",
                )
            time.sleep(PAUSE_SECONDS)

    def sleep(self) -> None:
        if not self._can_sleep or self._asleep:
            return
        with contextlib.suppress(OperationError):
            offered = self._ask("/is_sleeping").status == 200
            self._can_sleep = offered and self._ask("/sleep?level=1", {}).status == 200
            self._asleep = self._can_sleep
        _log.info("the rollout server for %s prompts %s", self._name, "sleeps" if self._asleep else "cannot sleep")

    def _wake(self) -> None:
        if not self._asleep:
            return
        self._asleep = False
        try:
            awake = self._ask("/wake_up", {}).status == 200
        except OperationError:
            awake = False
        if not awake:
            self._meet()
        # Whether an adapter's numbers outlive a sleep is not known for every version: it is pushed again.
        self.unload()
