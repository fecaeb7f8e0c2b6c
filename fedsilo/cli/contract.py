"""The promises of every command beside its options: whether it changes anything, may be repeated, streams, waits, and
with which exit statuses it ends. It is one table, from which `--schema`, `--dry-run`, `--timeout`, the reference and
the table of roles are made.

A command that is missing here fails `tests/console/test_cli_contract.py`. The sentence of `changes` is what `--dry-run`
says, so it names every kind of thing that the command may touch. The table of roles does not show what needs no
signature: a command that only reads is open to whoever may open the daemon's socket, or the file that it reads.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

PROGRAMS = ("silo", "coordinator", "fedconsole", "fedsilo")

# Every command may end with these: done, failed, wrong usage, our own fault, interrupted.
ALWAYS = (0, 1, 2, 70, 130)
BUG_EXIT_CODE, INTERRUPTED_EXIT_CODE = 70, 130

EXIT_MEANINGS: Mapping[int, str] = {
    0: "done, or the check passed",
    1: "the operation ran and failed",
    2: "wrong usage, configuration or input file, or no terminal where one is needed",
    3: "unreachable or timed out; safe to repeat, a change with the same --request-id",
    4: "not authenticated, or the role is missing",
    5: "policy or budget says no",
    6: "digest, policy or revision changed since it was read, or it exists already",
    7: "audit log, signature, digest or certificate does not verify",
    8: "no such object",
    9: "accepted, waits for approval",
    BUG_EXIT_CODE: "a fault of ours; a report file is named",
    INTERRUPTED_EXIT_CODE: "interrupted (Ctrl-C)",
}


@dataclass(frozen=True)
class Facts:
    """The promises of one command.

    Attributes:
        changes: what it may change, one sentence; empty for a command that only reads.
        idempotent: done twice, with the same --request-id where it has one, it leaves what it leaves when done once.
        streams: it prints one JSON document a line for as long as things happen.
        waits: it waits for a daemon, so that it takes --timeout.
        exits: statuses beside those in ALWAYS.
        dry_run: the option that lets nothing be changed.
        action: in `certs.roles.ACTIONS`, what the person who signs it must be allowed to; empty: it takes no signature.
    """

    changes: str = ""
    idempotent: bool = True
    streams: bool = False
    waits: bool = False
    exits: tuple[int, ...] = ()
    dry_run: str = "--dry-run"
    action: str = ""

    @property
    def exit_codes(self) -> tuple[int, ...]:
        return tuple(sorted({*ALWAYS, *self.exits}))


def full_name(command: str) -> str:
    """ "run submit" -> "fedsilo run submit"; a name that begins with its program stays."""
    return command if command.split(" ", 1)[0] in PROGRAMS else f"fedsilo {command}"


def facts_of(command: str) -> Facts:
    """Return the facts of a command by the name in its envelope. One that is not in the table is taken to only read."""
    return COMMANDS.get(full_name(command), _UNKNOWN)


_UNKNOWN = Facts()
_FILES, _ASKED = (4, 8), (3, 4, 8)
_SIGNED = (3, 4, 6, 8)

_ASKS = Facts(waits=True, exits=_ASKED)
_ASKS_AND_VERIFIES = Facts(waits=True, exits=(*_ASKED, 7))
_READS = Facts(exits=(8,))
_VERIFIES = Facts(exits=(4, 7, 8))


def _writes(what: str, *, exits: tuple[int, ...] = (6, 8), idempotent: bool = False, action: str = "") -> Facts:
    return Facts(changes=what, idempotent=idempotent, exits=exits, action=action)


def _commands_daemon(what: str, action: str, *, exits: tuple[int, ...] = _SIGNED) -> Facts:
    return Facts(changes=what, waits=True, exits=exits, action=action)


COMMANDS: Mapping[str, Facts] = {
    # ---- silo --------------------------------------------------------------------------------------
    "silo init": _writes(
        "writes silo.yaml, policy.yaml, lora_schema.json and canaries into --out, and the pins and roles into id/"
    ),
    "silo join": Facts(exits=(3, 4, 7, 8)),
    "silo check": Facts(exits=(3, 4, 5, 6, 7, 8)),
    "silo start": Facts(
        changes="runs guard and trainer: messages that the policy lets out leave this site, and state_dir is written",
        idempotent=False,
        exits=(3, 4, 5, 6, 7, 8),
    ),
    "silo status": _ASKS,
    "silo round": _ASKS,
    "silo logs": _READS,
    "silo pause": _commands_daemon("the trainer begins no further step until it is resumed", "silo.pause"),
    "silo resume": _commands_daemon("the trainer goes on", "silo.resume"),
    "silo leave": _commands_daemon("this silo is out of its run for good; the run goes on without it", "silo.leave"),
    "silo export-release": _commands_daemon(
        "writes --out: messages that the policy lets out, for somebody to carry to the coordinator",
        "transfer.export",
        exits=(*_SIGNED, 5),
    ),
    "silo import-plan": _commands_daemon(
        "the silo takes in a file of the coordinator's, as far as its policy and its people let it",
        "transfer.import",
        exits=(*_SIGNED, 7),
    ),
    "silo adapters list": _ASKS,
    "silo adapters accept": _commands_daemon(
        "signs that this silo trains on a held adapter all the same", "adapter.accept"
    ),
    "silo adapters refuse": _commands_daemon("signs that this silo does not train on a held adapter", "adapter.refuse"),
    "silo rollback": _commands_daemon(
        "this silo goes back to an accepted adapter and refuses those after it; what it sent stays with the others",
        "adapter.rollback",
        exits=(*_SIGNED, 7),
    ),
    "silo reload": _commands_daemon(
        "puts the policy file in force, unless something in it is looser", "change.propose", exits=(*_SIGNED, 5)
    ),
    "silo stop": _commands_daemon("ends guard and trainer; the open round goes on without this silo", "silo.stop"),
    "silo approvals list": _ASKS,
    "silo approvals show": _ASKS,
    "silo approvals approve": _commands_daemon(
        "signs that the shown bytes may leave; with the last approver needed they are sent and cannot be called back",
        "release.approve",
        exits=(*_SIGNED, 5, 7, 9),
    ),
    "silo approvals reject": _commands_daemon(
        "signs that the shown bytes may not leave; the round goes on without them",
        "release.reject",
        exits=(*_SIGNED, 5),
    ),
    "silo approvals release": _commands_daemon("signs that a halted kind, or this silo, may go on", "halt.release"),
    "silo approvals defer": _commands_daemon(
        "moves a release out of this person's way for a time; recorded", "release.defer"
    ),
    "silo approvals diff": _ASKS,
    "silo approvals history": _ASKS,
    "silo approvals payload": _commands_daemon(
        "the silo records in its audit log who read the content", "payload.read"
    ),
    "silo outbox list": _ASKS,
    "silo outbox show": _ASKS,
    "silo inbox list": _ASKS,
    "silo inbox show": _ASKS,
    "silo ledger show": _ASKS,
    "silo ledger limits": _ASKS,
    "silo ledger forecast": _ASKS,
    "silo ledger accept": _writes(
        "writes a signature into proposals/ beside the policy; with the second one the silo starts with this ledger",
        action="halt.release",
        exits=(4, 6, 8, 9),
    ),
    "silo audit list": _ASKS,
    "silo audit show": _ASKS,
    "silo audit status": _ASKS,
    "silo audit verify": _ASKS_AND_VERIFIES,
    "silo certs": _ASKS,
    "silo settings": _ASKS,
    "silo report case-mix": Facts(exits=(3, 4, 6, 7, 8)),
    "silo report benefit": Facts(exits=(3, 4, 6, 7, 8)),
    "silo doctor": _READS,
    # ---- coordinator -------------------------------------------------------------------------------
    "coordinator init": _writes(
        "writes federation.json, coordinator.yaml, charter.yaml and lora_schema.json into --out, and keys into id/"
    ),
    "coordinator check": Facts(exits=(4, 6, 7, 8)),
    "coordinator start": Facts(
        changes="serves the federation: silos are answered, and state_dir is written",
        idempotent=False,
        exits=(4, 6, 7, 8),
    ),
    "coordinator status": _ASKS,
    "coordinator stop": Facts(changes="ends the coordinator's process", waits=True, exits=(3, 4, 8)),
    "coordinator accept-clock": _commands_daemon(
        "no later time than the clock shows now is compared with any more", "halt.release"
    ),
    "coordinator backup": _writes("writes one new folder", exits=(4, 6, 7, 8)),
    "coordinator restore": _writes("fills an empty state_dir and an empty database", exits=(4, 6, 7, 8)),
    "coordinator export-plan": _commands_daemon(
        "writes --out: what waits for a silo, for somebody to carry there", "transfer.export"
    ),
    "coordinator import-release": _commands_daemon(
        "takes in a silo's file: its hello, signatures, answers and updates, as the charter lets them",
        "transfer.import",
        exits=(*_SIGNED, 7),
    ),
    "coordinator logs": Facts(streams=True, waits=True, exits=_ASKED),
    "coordinator silos list": _ASKS,
    "coordinator silos show": _ASKS,
    "coordinator outbox list": _ASKS,
    "coordinator outbox show": _ASKS,
    "coordinator inbox list": _ASKS,
    "coordinator inbox show": _ASKS,
    "coordinator audit list": _ASKS,
    "coordinator audit show": _ASKS,
    "coordinator audit status": _ASKS,
    "coordinator audit verify": _ASKS_AND_VERIFIES,
    "coordinator certs": _ASKS,
    "coordinator settings": _ASKS,
    "coordinator doctor": _READS,
    # ---- fedconsole --------------------------------------------------------------------------------
    "fedconsole": Facts(
        changes="what a person unlocks and answers in it; with --record a new file",
        idempotent=False,
        exits=(3, 4, 6, 7, 8),
        dry_run="--read-only",
    ),
    "fedconsole serve": Facts(
        changes="listens on this machine and starts a console that can only look",
        idempotent=False,
        exits=(3, 4, 6, 7, 8),
    ),
    # ---- fedsilo -----------------------------------------------------------------------------------
    "fedsilo demo": _writes("starts a federation on this machine and writes all of it below --out", exits=(3, 6, 7, 8)),
    "fedsilo experiment plan": _READS,
    "fedsilo experiment run": _writes("carries out cells in processes of this machine and appends their results"),
    "fedsilo experiment table": _READS,
    "fedsilo experiment plot": _writes("writes the picture --out", idempotent=True),
    "fedsilo experiment report": _writes("writes the page --out and its pictures", idempotent=True),
    "fedsilo experiment show": _READS,
    "fedsilo experiment work": Facts(streams=True, exits=(8,)),
    "fedsilo grade": Facts(streams=True, exits=(8,)),
    "fedsilo version": Facts(),
    "fedsilo doctor": _READS,
    "fedsilo watch": Facts(streams=True, waits=True, exits=_ASKED),
    "fedsilo bundle": _writes("writes one new .tar.gz file"),
    "fedsilo config show": Facts(exits=_FILES),
    "fedsilo config validate": Facts(exits=_FILES),
    "fedsilo config schema": Facts(),
    "fedsilo context list": Facts(exits=(4,)),
    "fedsilo context use": _writes("writes the person's contexts file", exits=_FILES, idempotent=True),
    "fedsilo context add": _writes("writes the person's contexts file", exits=(4, 6)),
    "fedsilo context remove": _writes("writes the person's contexts file", exits=_FILES),
    "fedsilo run submit": _commands_daemon("submits a run that starts when its silos have joined", "run.submit"),
    "fedsilo run list": _ASKS,
    "fedsilo run show": _ASKS,
    "fedsilo curves": Facts(
        changes="with --tensorboard writes event files below that folder", waits=True, exits=_ASKED
    ),
    "fedsilo metrics": Facts(waits=True, exits=(*_ASKED, 6)),
    "fedsilo run watch": Facts(streams=True, waits=True, exits=_ASKED),
    "fedsilo run init": _writes("writes an example of a run"),
    "fedsilo run start": _commands_daemon("starts a waiting run with the silos that have joined", "run.start"),
    "fedsilo run pause": _commands_daemon("the run delivers nothing more until it is resumed", "run.pause"),
    "fedsilo run resume": _commands_daemon("the run goes on", "run.resume"),
    "fedsilo run abort": _commands_daemon("ends the run; the adapter of its last committed round stays", "run.abort"),
    "fedsilo run export": Facts(
        changes="writes run_record.json, adapter/ and tensorboard/ into a new folder",
        idempotent=False,
        waits=True,
        exits=(*_ASKED, 6),
    ),
    "fedsilo run verify": _VERIFIES,
    "fedsilo policy init": _writes("writes policy.yaml and the LoRA schema beside it"),
    "fedsilo policy check": _READS,
    "fedsilo policy show": _READS,
    "fedsilo policy hash": _READS,
    "fedsilo policy diff": _READS,
    "fedsilo policy explain": Facts(exits=(7, 8)),
    "fedsilo policy test": _READS,
    "fedsilo policy propose": _writes(
        "signs a proposal and writes it beside the policy", exits=_SIGNED, action="change.propose"
    ),
    "fedsilo policy activate": _writes(
        "signs an approval of a proposal; with the last one needed the policy file is replaced",
        exits=(*_SIGNED, 7, 9),
        action="change.approve",
    ),
    "fedsilo policy schema make": _writes("writes a LoRA schema"),
    "fedsilo audit verify": _VERIFIES,
    "fedsilo audit show": Facts(
        changes="with --payload the silo records in its audit log who read it",
        waits=True,
        exits=(*_SIGNED, 7),
        action="payload.read",
    ),
    "fedsilo audit tail": Facts(exits=(7, 8)),
    "fedsilo audit release": Facts(exits=(7, 8)),
    "fedsilo audit replay": Facts(
        changes="with --rescreen the silo records in its audit log who asked",
        waits=True,
        exits=(*_SIGNED, 7),
        action="payload.read",
    ),
    "fedsilo audit prove": Facts(exits=(6, 7, 8)),
    "fedsilo audit export": Facts(
        changes="writes records into --out or --to, and how far it got", idempotent=False, exits=(3, 4, 6, 7, 8)
    ),
    "fedsilo audit report": _writes(
        "writes a new folder of pages and files; with --sign signs them", exits=(4, 6, 7, 8)
    ),
    "fedsilo certs ca-init": _writes("makes a root key and certificate in a new folder"),
    "fedsilo certs invite": _writes("writes a one-time token into the CA's folder", exits=(4, 6, 8)),
    "fedsilo certs request": _writes("makes keys and a request in --out", exits=(4, 6, 8)),
    "fedsilo certs renew": _writes("writes a request into --out", exits=(4, 6, 8)),
    "fedsilo certs sign": _writes("spends the request's token and writes a certificate", exits=(4, 6, 7, 8)),
    "fedsilo certs trial": _writes("makes the keys and certificates of every party in a new folder"),
    "fedsilo certs list": Facts(exits=_FILES),
    "fedsilo certs show": Facts(exits=_FILES),
    "fedsilo certs check": Facts(exits=_FILES),
    "fedsilo model build": _writes("writes a model folder"),
    "fedsilo data make-demo": _writes("writes a folder of prompts"),
    "fedsilo data from-sets": _writes("writes a folder of prompts"),
    "fedsilo data check": _READS,
    "fedsilo public lint": _READS,
}


# ---- `--schema` ------------------------------------------------------------------------------------------------------


def schema_of(name: str, command: Any) -> dict[str, Any]:
    """Return the schema of one command."""
    facts = facts_of(name)
    shown = [each for each in command.params if each.name != "help"]
    return {
        "name": name,
        "help": " ".join((command.help or "").split()),
        "arguments": [_parameter(each) for each in shown if each.param_type_name == "argument"],
        "options": [_parameter(each) for each in shown if each.param_type_name == "option"],
        "changes_state": bool(facts.changes),
        "changes": facts.changes,
        "dry_run": facts.dry_run if facts.changes else "",
        "idempotent": facts.idempotent,
        "streams": facts.streams,
        "waits": facts.waits,
        "exit_codes": {str(code): EXIT_MEANINGS[code] for code in facts.exit_codes},
    }


def commands_below(command: Any, words: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every command below one that does something by itself, with the words that name it."""
    below = getattr(command, "commands", None)
    if below is None:
        yield words, command
        return
    if getattr(command, "invoke_without_command", False):
        yield words, command
    for name, found in below.items():
        yield from commands_below(found, (*words, name))


def _parameter(parameter: Any) -> dict[str, Any]:
    is_option = parameter.param_type_name == "option"
    kind, choices = _kind(parameter.type_descriptor.annotation)
    found: dict[str, Any] = {
        "name": parameter.name if is_option else _argument_name(parameter),
        "type": kind,
        "required": bool(parameter.required),
        "default": _default(parameter),
        "multiple": bool(getattr(parameter, "multiple", False)) or parameter.nargs == -1,
        "help": " ".join((parameter.help or "").split()),
    }
    if choices:
        found["choices"] = choices
    if is_option:
        found["name"] = max(parameter.opts, key=len).lstrip("-")
        found["flags"] = [*parameter.opts, *parameter.secondary_opts]
        found["environment"] = parameter.envvar if isinstance(parameter.envvar, str) else ""
    return found


def _kind(annotation: Any) -> tuple[str, list[str]]:
    """Return the type of a value, and its choices where there is a list: `list[str] | None` is a str."""
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return "text", [str(each) for each in parts]
    if origin is not None:
        return _kind(next(each for each in parts if each is not type(None)))
    return _KINDS[annotation], []


_KINDS: Mapping[Any, str] = {bool: "boolean", int: "integer", float: "number", str: "text", Path: "path"}


def _argument_name(parameter: Any) -> str:
    return str(parameter.metavar or parameter.name).strip("{}[]").removesuffix("...").upper()


def _default(parameter: Any) -> Any:
    value = parameter.default
    if parameter.required or callable(value) or value is None:
        return None
    if isinstance(value, list | tuple):
        return [str(each) for each in value]
    return value if isinstance(value, bool | int | float | str) else str(value)
