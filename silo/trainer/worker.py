"""The trainer process: `python -P -m silo.trainer.worker --address unix:PATH`. It dials the guard and does the tasks
that the guard sends.

On another host it dials `tls:HOST:PORT` with `--certificate`, `--key` and `--site-ca`: a key of its own, made for this
link and good for nothing else. A trainer serves one run; who starts it by hand starts it again (`--wait-seconds`).

It holds the private data and the model, and no key and no network: the link to the guard is its only connection.
The order of a life: offline settings, dial, `probe` -> `probed`, and only in a sandbox that suffices
`configure` -> load -> refuse further connections -> `ready`; then `plan` and `task` messages until `stop` or until the
guard is gone.

What keeps an honest trainer from reaching out by accident are offline settings and a Python audit hook (`Refusals`):
libraries that phone home, look up a hub, resolve a name or start a program do so through Python, and raise there
instead (T10). Not covered: code that leaves Python (ctypes, a C extension), or that alters this module. The sandbox
around the process (namespaces, another user, a container) hold those; the guard probes them.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import os
import platform
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedsilo.files.extras import not_installed
from fedsilo.files.task_files import CLOSED, STANDARD, FieldNames
from fedsilo.protocol.codec import Buffer
from fedsilo.protocol.errors import FedSiloError, NotAllowedError, NotFoundError, OperationError, UsageError
from fedsilo.protocol.plan import plan_from_canonical
from fedsilo.protocol.tasks import TrainerTask
from silo.budgets import CACHE_BYTES, MICROBATCH_TOKENS
from silo.link import OFFLINE, Link, LinkClosed, LinkMessage, LinkRefused, LinkSecurity, MessageLink, dial
from silo.trainer.data import Hex, IndexSettings, provide_index, read_fields
from silo.trainer.rollout.engine import RolloutPlace
from silo.trainer.scale_out import (
    OUT_OF_MEMORY,
    Follower,
    Leader,
    Place,
    is_memory_failure,
    left_alone,
    start_others,
    started_by_a_launcher,
)

GRADING_MODULE = "fedsilo.grading.worker"

# Events of sys.audit that make or use a connection. Reading and writing one already open raises no event.
_NETWORK_EVENTS = frozenset(
    {
        "socket.__new__",
        "socket.bind",
        "socket.connect",
        "socket.sendto",
        "socket.sendmsg",
        "socket.getaddrinfo",
        "socket.gethostbyname",
        "socket.gethostbyaddr",
        "socket.getnameinfo",
        "urllib.Request",
    }
)
_AF_UNIX, _SOCK_STREAM = 1, 1
_PROCESS_EVENTS = frozenset({"os.system", "os.exec", "os.posix_spawn", "os.fork", "os.forkpty", "pty.spawn"})


def set_offline(environment: MutableMapping[str, str]) -> None:
    """Fill in what is not set. Call before a Hugging Face library is imported: they read it once."""
    for name, value in OFFLINE.items():
        environment.setdefault(name, value)


def verify_offline(environment: Mapping[str, str]) -> None:
    """Check that the environment is offline. Raises UsageError: a variable is missing or says otherwise."""
    for name, value in OFFLINE.items():
        if environment.get(name) != value:
            raise UsageError(
                f"the trainer runs with {name}={environment.get(name)!r}; it must be {value!r}",
                hint=f"start it with {name}={value}, or leave it unset",
            )


def verify_hub_offline(modules: Mapping[str, Any]) -> None:
    """Check that the hub library is offline. Raises UsageError: the hub library was imported before its variable was
    set. modules: sys.modules."""
    hub = modules.get("huggingface_hub.constants")
    if hub is not None and not hub.HF_HUB_OFFLINE:
        raise UsageError("huggingface_hub was loaded before the trainer could switch it offline")


class Refusals:
    """The audit hook. Once installed it stays; `paused` lets the guard's probes test the sandbox behind it.

    Where rollouts come from servers, unix stream sockets may be made and connected to the paths of `allow`, word for
    word. What is said there is not looked at: the guard starts these servers in sandboxes of their own.
    """

    def __init__(self) -> None:
        self._paused = False
        self._sockets: frozenset[str] = frozenset()
        self.refused = 0

    def install(self) -> None:
        sys.addaudithook(self._hook)

    def allow(self, *sockets: Path) -> None:
        """The unix sockets of rollout servers: the only addresses that may be connected to. Call before `install`."""
        self._sockets = frozenset(map(str, sockets))

    @contextmanager
    def paused(self) -> Iterator[None]:
        self._paused = True
        try:
            yield
        finally:
            self._paused = False

    def _hook(self, event: str, arguments: tuple[object, ...]) -> None:
        if self._paused:
            return
        if event in _NETWORK_EVENTS or event in _PROCESS_EVENTS:
            if self._sockets and self._leads_to_a_rollout_server(event, arguments):
                return
            self._refuse(event)
        if event == "subprocess.Popen" and not is_grading_command(arguments):
            self._refuse(event)

    def _leads_to_a_rollout_server(self, event: str, arguments: tuple[object, ...]) -> bool:
        """Return True for a unix stream socket that is made, and for one that is connected to a path that was
        allowed."""
        if event == "socket.__new__":
            return arguments[1:3] == (_AF_UNIX, _SOCK_STREAM)
        return event == "socket.connect" and arguments[1] in self._sockets

    def _refuse(self, event: str) -> None:
        self.refused += 1
        raise PermissionError(f"the trainer may not do this: {event}")


def is_grading_command(arguments: tuple[object, ...]) -> bool:
    """Return True for this interpreter running the grading child, the one program a trainer starts.

    Args:
        arguments: of the audit event `subprocess.Popen`: (executable, argument list, folder, environment).
    """
    command = arguments[1] if len(arguments) > 1 else None
    if not isinstance(command, list | tuple):
        return False
    words = [os.fsdecode(word) for word in command if isinstance(word, str | bytes | os.PathLike)]
    return words[:4] == [sys.executable, "-P", "-m", GRADING_MODULE]


@dataclass(frozen=True)
class ModelPlace:
    """The base model's folder, and the number format that it is loaded in."""

    __pydantic_config__ = CLOSED
    path: Path
    load: str


@dataclass(frozen=True)
class TaskPlace:
    """A task file, and the verifier of its answers."""

    __pydantic_config__ = CLOSED
    path: Path
    verifier: str


@dataclass(frozen=True)
class Configuration:
    """The `configure` message. Paths are as the trainer sees them inside its sandbox."""

    __pydantic_config__ = CLOSED
    silo: str
    model: ModelPlace
    private: tuple[Path, ...]
    verifier: str
    public: TaskPlace
    held_out: TaskPlace
    site_secret: Hex = field(repr=False)
    threads: int = 1
    microbatch_tokens: int = MICROBATCH_TOKENS
    cache_bytes: int = CACHE_BYTES
    checkpointing: bool = False
    shard_base: bool = False
    scratch: str = ""  # empty: an external trainer names its own
    holdout_share: float = 0.0
    fields: FieldNames = STANDARD
    template: str | None = None  # as in `TextCodec`
    screen_index: IndexSettings | None = None
    own_verifiers_sha256: str | None = None  # as the guard finds them; None: not compared
    rollout: RolloutPlace | None = None  # None: the embedded engine
    agreement: dict[str, float] = field(default_factory=dict)  # of the engine with the trainer; empty: the defaults


if TYPE_CHECKING:
    from fedsilo.grading.worker import GradingProcess
    from silo.trainer.data import Grader
    from silo.trainer.resume import StateStore
    from silo.trainer.scale_out import Processes
    from silo.trainer.session import Session

DIAL_PAUSE_SECONDS = 0.5


def begin(session: Session, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Begin a run by the plan that a link message has; returns what the answer to it says.

    Raises:
        OperationError: the message lacks a part.
        PeerError: the plan is none.
        UsageError: as `Session.begin_run`.
    """
    from silo.trainer.adapters.lora import shape_from_schema

    try:
        plan, schema = plan_from_canonical(str(fields["canonical_json"])), fields["lora_schema"]
    except KeyError as error:
        raise OperationError(f"the plan message lacks {error}", code="BAD_TASK") from error
    overlong = session.begin_run(plan, shape_from_schema(schema))
    return {"overlong": overlong, "private_prompts": session.private_prompts}


def done_message(task: TrainerTask, metrics: Mapping[str, Any], body: Buffer) -> LinkMessage:
    """Return the answer to a task that is done."""
    fields = {"task": task.name, "round": task.round, "step": task.step, "metrics": dict(metrics)}
    return LinkMessage("done", fields, body)


def failed_message(error: FedSiloError) -> LinkMessage:
    """Return the answer to a message that this trainer could not follow."""
    fields = {"code": error.code, "message": error.message, "hint": error.hint}
    return LinkMessage("failed", {**fields, "input": isinstance(error, UsageError | NotFoundError)})


def load_model(folder: Path, load: str) -> Any:
    """The base model from disk, on the GPU where there is one. safetensors only, no code from the folder (T22).

    Its headers are read first, and refused where they do not suffice: transformers fills a weight that is missing with
    random numbers, and with others each time.

    Raises:
        UsageError: the folder cannot be loaded, or the load type needs what this installation lacks.
    """
    import torch
    from transformers import AutoModelForCausalLM

    from fedsilo.files.model_facts import read_model_facts
    from silo.trainer.quantised import LOADS, load_quantised

    read_model_facts(folder)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    for narrow in LOADS:
        if load == narrow:
            return load_quantised(folder, narrow).to(device)
    dtypes = {"fp32": torch.float32, "bf16": torch.bfloat16}
    if load not in dtypes:
        raise UsageError(f"model.load {load!r} is not known", hint="fp32, bf16, nf4 or fp8")
    try:
        model = AutoModelForCausalLM.from_pretrained(
            str(folder),
            dtype=dtypes[load],
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            attn_implementation="sdpa",
        )
    except (OSError, ValueError) as error:
        raise UsageError(f"no model can be loaded from {folder}: {str(error).splitlines()[0][:200]}") from error
    return model.to(device).eval()


class Worker:
    """The message loop.

    Args:
        link: to the guard.
        refusals: audit hook to install once everything is loaded; None leaves it out (tests share a process).
        scratch: folder for the overlap index, where the guard names none since it runs elsewhere.
    """

    def __init__(
        self,
        link: MessageLink,
        refusals: Refusals | None,
        scratch: Path | None = None,
        group: Callable[[], Processes | None] = lambda: None,
    ) -> None:
        self._link = link
        self._group = group
        self._refusals = refusals
        self._scratch = scratch
        self._session: Session | None = None
        self._grading: list[GradingProcess] = []
        self._kept: StateStore | None = None

    def run(self) -> None:
        """Answer messages until the guard says `stop` or goes away.

        Raises:
            NotAllowedError: the guard does not take this trainer; says why.
            LinkClosed: the guard went away before it said anything.
        """
        has_heard_guard = False
        try:
            while True:
                try:
                    message = self._link.receive()
                except LinkRefused as error:
                    raise _not_taken(error.message) from error
                except LinkClosed:
                    if has_heard_guard:
                        return
                    raise
                if message.type == "stop":
                    return
                if message.type == "refused":
                    raise _not_taken(f"the guard refuses this trainer: {str(message.fields.get('message', ''))[:500]}")
                has_heard_guard = True
                self._link.send(self._answer(message))
        finally:
            if self._session is not None:
                self._session.close()
            for process in self._grading:
                process.close()

    def _answer(self, message: LinkMessage) -> LinkMessage:
        try:
            match message.type:
                case "configure":
                    with _everything_stays():
                        return self._configure(
                            read_fields(Configuration, message.fields, "the trainer's configuration")
                        )
                case "probe":
                    return self._probe(message.fields)
                case "plan":
                    return self._plan(message.fields)
                case _:
                    return self._task(message)
        except FedSiloError as error:
            # The guard is this silo's own: it may read the sentence. Only the code ever goes further (T8).
            return failed_message(error)
        except ModuleNotFoundError as error:
            missing = not_installed(error)
            if missing is None:
                raise
            return failed_message(missing)

    def _configure(self, configuration: Configuration) -> LinkMessage:
        import torch

        torch.set_num_threads(configuration.threads)
        import transformers

        from fedsilo.files.task_files import PUBLIC, listed, read_tasks, read_usable
        from fedsilo.grading.data_findings import find as find_repeated
        from fedsilo.grading.own_verifiers import own_verifiers_sha256
        from fedsilo.grading.worker import full_check
        from silo.trainer.agreement import limits_from
        from silo.trainer.data import load_codec
        from silo.trainer.resume import state_store
        from silo.trainer.run import Material
        from silo.trainer.session import Session

        verify_offline(os.environ)
        verify_hub_offline(sys.modules)
        transformers.utils.logging.set_verbosity_error()
        transformers.utils.logging.disable_progress_bar()
        public_place, held_out_place = configuration.public, configuration.held_out
        verifiers = {configuration.verifier, public_place.verifier, held_out_place.verifier}
        own, expected = own_verifiers_sha256(verifiers), configuration.own_verifiers_sha256
        if expected not in (None, own):
            raise UsageError(
                f"own verifiers of the trainer: {own[:12] or 'none'}, beside the guard: {str(expected)[:12] or 'none'}",
                hint="install the same package, of the same version, for both interpreters",
                code="VERIFIER_MISMATCH",
            )
        graders = {verifier: self._grader(verifier) for verifier in sorted(verifiers)}
        with full_check(configuration.verifier) as is_readable:
            files = read_usable(configuration.private, is_readable, configuration.fields)
        private = [task for file in files for task in file.rows]
        public = read_tasks(public_place.path, PUBLIC)
        held_out = read_tasks(held_out_place.path)
        found_twice = [each.words(ids=False) for each in find_repeated(files, public, held_out)]
        model = load_model(configuration.model.path, configuration.model.load)
        material = Material(
            silo=configuration.silo,
            model=model,
            codec=load_codec(configuration.model.path, configuration.template),
            private=private,
            public=public.rows,
            held_out=held_out.rows,
            private_grader=graders[configuration.verifier],
            public_grader=graders[public_place.verifier],
            held_out_grader=graders[held_out_place.verifier],
            site_secret=configuration.site_secret,
            microbatch_tokens=configuration.microbatch_tokens,
            cache_bytes=configuration.cache_bytes,
            rollout=configuration.rollout,
            agreement=limits_from(configuration.agreement),
            checkpointing=configuration.checkpointing,
            holdout_share=configuration.holdout_share,
        )
        scratch = Path(configuration.scratch) if configuration.scratch else self._scratch
        group = self._group()
        self._session = session = Session(
            material, on_phase=self._report_phase, group=group, shard_base=configuration.shard_base
        )
        self._kept = state_store(session, scratch, configuration.site_secret, group)
        if self._refusals is not None:
            if (place := configuration.rollout) is not None:
                self._refusals.allow(place.private, place.public)
            self._refusals.install()
        context = getattr(model.config, "max_position_embeddings", 0)
        return LinkMessage(
            "ready",
            {
                "private_rows": len(session.split.training),
                "holdout_rows": len(session.split.holdout),
                "split": session.split.digest,
                "public_rows": len(public.rows),
                "screen_index": provide_index(
                    configuration.screen_index if group is None or group.rank == 0 else None,
                    private,
                    public.rows,
                    scratch,
                ),
                "held_out_rows": len(held_out.rows),
                "dropped": dict(sum((Counter(file.reasons) for file in files), Counter())),
                "found_twice": found_twice,
                "left_out": [f"{file.path}: {listed(file.problems, file.unit)}" for file in files if file.problems],
                "context_tokens": context,
                "versions": {
                    "python": platform.python_version(),
                    "torch": torch.__version__,
                    "transformers": transformers.__version__,
                },
                "threads": torch.get_num_threads(),
                "processes": 1 if group is None else group.size,
                "device": str(next(model.parameters()).device),
            },
        )

    def _grader(self, verifier: str) -> Grader:
        from fedsilo.grading.worker import GradingProcess
        from silo.trainer.data import Mark

        process = GradingProcess(verifier, runs_programs=True)
        self._grading.append(process)

        def grade(pairs: Sequence[tuple[str, str]]) -> list[Mark]:
            return [Mark(verdict.correct, verdict.reward) for verdict in process.grade_many(list(pairs))]

        # the child starts now, not in the first step; one that cannot, such as for want of a sandbox, is no trainer
        process.wait_ready()
        return grade

    def _probe(self, fields: dict[str, Any]) -> LinkMessage:
        from fedsilo.sandbox.probes import run_probes

        # The probes try the sandbox, not the hook in front of them.
        with self._refusals.paused() if self._refusals is not None else contextlib.nullcontext():
            return LinkMessage("probed", {"results": run_probes(fields)})

    def _plan(self, fields: dict[str, Any]) -> LinkMessage:
        planned = begin(self._begun(), fields)
        begun = self._kept.begin(resume=fields.get("resume") is True) if self._kept is not None else {}
        return LinkMessage("planned", {**planned, **begun})

    def _task(self, message: LinkMessage) -> LinkMessage:
        from silo.trainer.tasks import task_from_fields

        if self._kept is not None and (again := self._kept.answer_to(message)) is not None:
            return again
        task = task_from_fields(message.fields, message.body)
        try:
            done = self._begun().carry_out(task, message.body)
        except Exception as error:
            if (group := self._group()) is not None:
                group.require_agreed(error)
            if not is_memory_failure(error):
                raise
            raise OperationError(
                "the trainer's memory does not suffice; lower trainer.microbatch_tokens or trainer.cache_bytes",
                code=OUT_OF_MEMORY,
            ) from error
        failures = {
            "errors": sum(process.counts.errors for process in self._grading),
            "timeouts": sum(process.counts.timeouts for process in self._grading),
            "crashes": sum(process.counts.crashes for process in self._grading),
        }
        answer = done_message(task, {**done.metrics, "grading_failures": failures}, done.body)
        if self._kept is not None:
            self._kept.keep(message, answer)
        return answer

    def _begun(self) -> Session:
        if self._session is None:
            raise OperationError("the trainer has not been configured", code="BAD_TASK")
        return self._session

    def _report_phase(self, round_number: int, step: int, phase: str) -> None:
        self._link.send(LinkMessage("step", {"round": round_number, "step": step, "phase": phase}))


@contextlib.contextmanager
def _everything_stays() -> Iterator[None]:
    """Look for no garbage inside, nor ever among what is made inside: libraries and a model, which stay to the end.

    Millions of objects come with them, and each search would walk them all: a tenth of the start, and more later on.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def _not_taken(message: str) -> NotAllowedError:
    return NotAllowedError(message, hint="the guard's log names the cause; `fedsilo certs check --role trainer` helps")


def site_tls(certificate: Path | None, key: Path | None, site_ca: Path | None) -> LinkSecurity:
    """The trainer's end of a TLS link. Raises UsageError, NotFoundError, NotAllowedError: a file is not right."""
    if certificate is None or key is None or site_ca is None:
        raise UsageError("a tls: address needs --certificate, --key and --site-ca")
    from silo.link_tls import LinkFiles, LinkTls  # in the guard's own sandbox there are no certificates to judge

    return LinkTls(LinkFiles(certificate, key, site_ca), "trainer")


def dial_patiently(address: str, tls: LinkSecurity | None, wait_seconds: float) -> Link:
    """Dial until the guard listens; it does so only while it waits for a trainer. Raises LinkClosed, LinkRefused."""
    end = time.monotonic() + wait_seconds
    while True:
        try:
            return dial(address, tls=tls)
        except LinkRefused:
            raise
        except LinkClosed:
            if time.monotonic() + DIAL_PAUSE_SECONDS > end:
                raise
            time.sleep(DIAL_PAUSE_SECONDS)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m silo.trainer.worker", description="The trainer of one silo.")
    parser.add_argument("--address", required=True, help="the guard: unix:PATH or tls:HOST:PORT")
    parser.add_argument("--certificate", type=Path, help="for tls: this trainer's, under the site CA")
    parser.add_argument("--key", type=Path, help="for tls: its private key, mode 0600")
    parser.add_argument("--site-ca", type=Path, help="for tls: the site's root certificate")
    parser.add_argument("--scratch", type=Path, help="external trainer: folder for its overlap index")
    parser.add_argument("--wait-seconds", type=float, default=0.0, help="keep dialling so long until the guard listens")
    parser.add_argument("--processes", type=int, default=1, help="this many train together, on this machine")
    options = parser.parse_args(arguments)
    set_offline(os.environ)
    try:
        verify_offline(os.environ)
        place = start_others(options.processes) if options.processes != 1 else started_by_a_launcher(os.environ)
        if place is not None and place.rank > 0:
            follow(place)
            return 0
        tls = None
        if options.address.startswith("tls:"):
            tls = site_tls(options.certificate, options.key, options.site_ca)
        link = dial_patiently(options.address, tls, options.wait_seconds)
        try:
            if place is None:
                Worker(link, Refusals(), options.scratch).run()
            else:
                lead(link, place, options.scratch)
        finally:
            link.close()
    except FedSiloError as error:
        text = f"error: {error.message} [{error.code}]\n" + (f"hint: {error.hint}\n" if error.hint else "")
        with contextlib.suppress(OSError):  # a full disk under the log
            sys.stderr.write(text)
        return error.exit_code
    return 0


def lead(link: MessageLink, place: Place, scratch: Path | None) -> None:
    """The life of process 0 of several. Raises OperationError: another one died, so this one must end."""
    leader = Leader(link, place)
    try:
        Worker(leader, Refusals(), scratch, lambda: leader.group).run()
    except RuntimeError as error:
        if not left_alone(error):
            raise
        raise OperationError("another process of the trainer has died", code="PROCESS_LOST") from error


def follow(place: Place) -> None:
    """The life of any other process: it ends with process 0, whose own last words say why."""
    try:
        follower = Follower(place)
        Worker(follower, Refusals(), None, lambda: follower.group).run()
    except RuntimeError as error:
        if not left_alone(error):
            raise


if __name__ == "__main__":
    status = main()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):
            stream.flush()
    # What is left has no end of its own; to take torch apart piece by piece would cost a second of processor time.
    os._exit(status)
