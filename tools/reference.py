"""The reference pages of `docs/reference/`, written from the code: `make reference`, or `python -m tools.reference`.

Each page is a function of what the commands themselves use: the typer apps, the pydantic models, the rule list, the
message catalogue, the record's closed lists, the error tree. `tests/house/test_docs.py` fails when a page is not what
these functions say.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

from google.protobuf.descriptor import Descriptor
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from fedsilo.cli.output import PANEL

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "docs" / "reference"
WHOLE_NUMBER_MAX = 2**53  # what JSON carries exactly; a limit of every whole number, so not worth a word
HEADING = "<!-- Written by `make reference` from the code; a change made here is lost. -->\n\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args()
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name, text in pages().items():
        (FOLDER / name).write_text(text, encoding="utf-8")
        print(FOLDER.relative_to(ROOT) / name)
    from tools.rounds_page import write  # it takes helpers from here

    print(write().relative_to(ROOT))
    return 0


def pages() -> dict[str, str]:
    """File name -> whole text of each page."""
    from tools.reference_figures import figures_page
    from tools.reference_sizing import sizing_page
    from tools.threats import threats_page

    made: dict[str, Callable[[], str]] = {
        "cli.md": commands_page,
        "configuration.md": configuration_page,
        "policy.md": policy_page,
        "rulesets.md": rulesets_page,
        "messages.md": messages_page,
        "audit-record.md": audit_page,
        "exit-codes.md": exit_codes_page,
        "figures.md": figures_page,
        "sizing.md": sizing_page,
        "threats.md": threats_page,
    }
    return {name: HEADING + re.sub(r"\n{3,}", "\n\n", make()).strip() + "\n" for name, make in made.items()}


# ---- commands ------------------------------------------------------------------------------------------


def commands_page() -> str:
    parts = [
        "# Commands",
        "Four programs. Every command takes `--help` and `--json`, which prints one "
        "envelope on stdout: `{schema, command, ok, data, warnings, error: {code, message, hint, retryable} | null}`. "
        "Every program takes `--version`. What the exit status means: [exit codes](exit-codes.md); 0, 1, 2, 70 and 130 "
        "may be that of every command.",
        *_common_parts(),
    ]
    for program, command in programs():
        parts.append(f"## {program}\n\n{sentence(command.help)}")
        for words, found in subcommands(command, (program,)):
            parts.append(_command_text(words, found))
    return "\n\n".join(parts)


def _common_parts() -> Iterator[str]:
    from fedsilo.cli import silo as cli_silo

    yield (
        "## Every command\n\n`--dry-run` is an option of each command that changes something, `--timeout` of each that "
        "waits for a daemon; a command that has one of its own by that name keeps it. `PROGRAM --schema` prints the "
        "schemas of all commands of a program."
    )
    pause = next(command for words, command in subcommands(_tree(cli_silo.app), ("silo",)) if words[1] == "pause")
    common = [each for each in pause.params if each.rich_help_panel == PANEL]
    yield markdown_table(("", ""), ((f"`{each.opts[0]}`", sentence(each.help)) for each in common))
    yield (
        "A dry run ends at the first change, so it says what would be changed first and has checked what comes before. "
        "A command that a person signs is shown with the person's roles, as files beside the certificate have them; "
        "the daemon may still refuse it.\n\n"
        "`PROGRAM --install-completion` makes the shell complete commands and options."
    )


def _tree(app: Any) -> Any:
    from typer.main import get_command

    return get_command(app)


def programs() -> Iterator[tuple[str, Any]]:
    """(name, command tree) of each of the four programs."""
    from fedsilo.cli import console as cli_serve
    from fedsilo.cli import coordinator as cli_coordinator
    from fedsilo.cli import fedsilo as cli_fedsilo
    from fedsilo.cli import silo as cli_silo

    yield "silo", _tree(cli_silo.app)
    yield "coordinator", _tree(cli_coordinator.app)
    yield "fedconsole", _tree(cli_serve.program)
    yield "fedsilo", _tree(cli_fedsilo.app)


def subcommands(command: Any, words: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every command below one that does something by itself, with the words that name it."""
    from fedsilo.cli.contract import commands_below

    yield from commands_below(command, words)


def _command_text(words: tuple[str, ...], command: Any) -> str:
    arguments = [each for each in command.params if each.param_type_name == "argument"]
    options = [each for each in command.params if each.param_type_name == "option" and each.name != "help"]
    usage = " ".join([*words, *(_placeholder(each) for each in arguments), *(["[OPTIONS]"] if options else [])])
    lines = [f"### {' '.join(words)}", sentence(command.help), f"```\n{usage}\n```", _promised(" ".join(words))]
    rows = [(f"`{_placeholder(each)}`", sentence(each.help), "") for each in arguments]
    rows += [
        (f"`{', '.join([*each.opts, *each.secondary_opts])}`", _told(each), _default(each))
        for each in options
        if "--json" not in each.opts and each.rich_help_panel != PANEL
    ]
    if rows:
        lines.append(markdown_table(("", "", "default"), rows))
    return "\n\n".join(lines)


def _promised(name: str) -> str:
    """One line of what contract.py says of a command."""
    from fedsilo.cli.contract import ALWAYS, facts_of

    facts = facts_of(name)
    exits = ", ".join(str(code) for code in facts.exit_codes if code not in ALWAYS)
    parts = [f"Changes: {facts.changes}" if facts.changes else "Only reads"]
    if facts.changes:
        parts.append("may be repeated" if facts.idempotent else "not to be repeated blindly")
        parts.append(f"`{facts.dry_run}`")
    parts += ["waits: `--timeout`"] * facts.waits + ["streams"] * facts.streams
    return f"{'; '.join(parts)}." + (f" Exit {exits}." if exits else "")


def _placeholder(argument: Any) -> str:
    name = (argument.metavar or argument.name).strip("{}[]").removesuffix("...").upper().removesuffix("_FILE")
    many = "..." if argument.nargs == -1 else ""
    return f"{name}{many}" if argument.required else f"[{name}{many}]"


def _told(option: Any) -> str:
    more = [f"environment: `{option.envvar}`"] if option.envvar else []
    if option.multiple:
        more.append("may be repeated")
    return sentence("; ".join([(option.help or "").rstrip("."), *more]))


def _default(option: Any) -> str:
    if option.required:
        return "required"
    value = option.default
    if value in (None, "", False, [], ()) or callable(value):
        return ""
    return f"`{getattr(value, 'value', value)}`"


# ---- configuration -------------------------------------------------------------------------------------


def configuration_page() -> str:
    from coordinator.config import CoordinatorConfig
    from fedsilo.protocol.plan import Plan
    from silo.config import SiloConfig

    example = (ROOT / "examples" / "hospital_a.yaml").read_text(encoding="utf-8")
    return "\n\n".join(
        [
            "# Configuration",
            "Three files. In each, an unknown or repeated key is an error that names its line, and relative paths "
            "start "
            "at the file's own folder. A default of `-` means that the key must be there.",
            "## silo.yaml\n\nWritten by `silo init`, read by `silo start`.",
            model_table(SiloConfig),
            f"With a comment for every key:\n\n```yaml\n{example.strip()}\n```",
            "## coordinator.yaml\n\nWritten by `coordinator init`, read by `coordinator start`.",
            model_table(CoordinatorConfig),
            "## run.yaml\n\nGiven to `fedsilo run submit`. What the sites agreed on (federation, hashes, LoRA, "
            "public and "
            "held-out set, load, wire type) is filled in by the coordinator and cannot be chosen here; `run` and "
            "`silos` "
            "may be left out. `start_adapter` names the PEFT adapter folder that the run starts from, a path at the "
            "coordinator from the folder of `coordinator.yaml` on ([how](../how-to/start-adapter.md)); without it the "
            "first adapter is drawn from the seed. The whole plan, which the coordinator signs and every silo checks "
            "against its policy:",
            model_table(Plan),
        ]
    )


def model_table(model: type[BaseModel]) -> str:
    rows = [(f"`{key}`", kind, default) for key, kind, default in model_rows(model)]
    return markdown_table(("key", "value", "default"), rows)


def model_rows(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, str, str]]:
    """(dotted key, kind of value, default) of every key of a closed model, nested ones included."""
    for name, info in model.model_fields.items():
        if info.exclude or info.annotation is type(None):  # the tombstone of a kind
            continue
        key = f"{prefix}{info.alias or name}"
        nested, many = _nested(info.annotation)
        if nested is not None and info.description:  # written in another form than the model's
            yield key, info.description, _shown_default(info, None)
        elif nested is not None:
            if many or not info.is_required():
                yield key, "any number, each by its name" if many else "block", _shown_default(info, nested)
            if nested.model_fields:
                yield from model_rows(nested, f"{key}.NAME." if many else f"{key}.")
        else:
            told = f"; {info.description}" if info.description else ""
            yield key, _kind(info.annotation, info) + told, _shown_default(info, None)


def _nested(annotation: Any) -> tuple[type[BaseModel] | None, bool]:
    """The model in an annotation such as `Model | None` or `dict[str, Model]`, and whether it is a mapping of them."""
    if inspect.isclass(annotation) and issubclass(annotation, BaseModel):
        return annotation, False
    if get_origin(annotation) is dict:
        return _nested(get_args(annotation)[1])[0], True
    if get_origin(annotation) in (Union, UnionType):
        for part in get_args(annotation):
            found, many = _nested(part)
            if found is not None:
                return found, many
    return None, False


def _kind(annotation: Any, info: FieldInfo | None = None) -> str:
    origin, arguments = get_origin(annotation), get_args(annotation)
    text: str
    if origin is Literal:
        text = " or ".join(f"`{each}`" for each in arguments)
    elif origin in (Union, UnionType):
        text = " or ".join(dict.fromkeys(_kind(each) for each in arguments))
    elif origin is tuple:
        parts = [_kind(each) for each in arguments if each is not Ellipsis]
        text = f"list of {parts[0]}" if Ellipsis in arguments else f"[{', '.join(parts)}]"
    elif origin is dict:
        text = f"a {_kind(arguments[1])} by name"
    elif hasattr(annotation, "__metadata__"):
        text = _kind(arguments[0])
    else:
        text = {
            "int": "whole number", "float": "number", "str": "text", "bool": "`true` or `false`", "Path": "path",
            "NoneType": "`null`",
        }.get(getattr(annotation, "__name__", ""), str(annotation))  # fmt: skip
    bounds = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}
    found = [
        f"{word} {getattr(limit, name):g}"
        for limit in (info.metadata if info else ())
        for name, word in bounds.items()
        if isinstance(getattr(limit, name, None), int | float) and getattr(limit, name) < WHOLE_NUMBER_MAX
    ]
    return ", ".join([text, *found])


def _shown_default(info: FieldInfo, nested: type[BaseModel] | None) -> str:
    if info.is_required():
        return "-"
    if nested is not None:
        return "absent" if info.default is None else "its own defaults"
    if isinstance(info.json_schema_extra, dict) and (of_a_request := info.json_schema_extra.get("of_a_request")):
        return f"`{of_a_request}`"
    value = info.get_default(call_default_factory=True)
    if value is None:
        return "`null`"
    return '`""`' if value == "" else f"`{str(value).lower() if isinstance(value, bool) else value}`"


# ---- policy --------------------------------------------------------------------------------------------


def policy_page() -> str:
    from fedsilo.cli.policy import NOTICES
    from policies.custom_patterns import PATTERNS_MAX, CustomPattern
    from policies.kinds import POLICY_FILE
    from policies.rules import RULES

    ruleset = (ROOT / "policies" / "rulesets" / "pubswap.yaml").read_text(encoding="utf-8")
    rules = [
        (each.name, f"`{each.reason}`", ", ".join(f"`{kind}`" for kind in sorted(each.kinds)) or "every kind",
         sentence(inspect.cleandoc(each.why or each.check.__doc__ or "").split("\n\n")[0].replace("\n", " ")))
        for each in RULES
    ]  # fmt: skip
    return "\n\n".join(
        [
            "# Policy",
            "One file per site says what may leave it and what it takes in; the coordinator checks the same with a "
            "charter "
            "of the same form. A kind, key or field that is not named is denied. There are no expressions and no code. "
            "`fedsilo policy hash` names a policy by its meaning, not by its comments.",
            "## The rules\n\nAll of them are judged on every message, so a refusal explains itself in full. A rule "
            "that "
            "fails to give an answer denies. The reason is for the site's own log; the coordinator is told `DECLINED`.",
            markdown_table(("rule", "reason", "kinds", "what it asks"), rules),
            "## The keys\n\n`absent` means that the kind is denied.",
            model_table(POLICY_FILE),
            "## A file of own patterns\n\n`text_screens.pii_basic.custom_file` names it. It has one key, `patterns`: "
            f"a list of at most {PATTERNS_MAX}, each with these keys. "
            "[How to write one](../how-to/screen-answers.md#own-patterns).",
            model_table(CustomPattern),
            "## The shipped ruleset `pubswap`\n\n`fedsilo policy init` and `silo init` fill in what begins with `$` "
            "from "
            f"the site's own files.\n\n```yaml\n{ruleset.strip()}\n```",
            "## What no policy promises\n\nSaid by `fedsilo policy check` of every policy it reads:",
            "\n".join(f"- {sentence(each)}" for each in NOTICES),
        ]
    )


# ---- rulesets ------------------------------------------------------------------------------------------


def rulesets_page() -> str:
    from fedsilo.protocol.strict_yaml import load
    from policies.render import RULESETS
    from tools.reference_capacity import capacity_parts
    from tools.ruleset_methods import METHOD_RULESETS

    folder = ROOT / "policies" / "rulesets"
    methods = {name: ", ".join(each) for each, name, _ in METHOD_RULESETS}
    rows = []
    for name in RULESETS:
        value = load((folder / f"{name}.yaml").read_bytes(), name).value
        kinds = [", ".join(f"`{kind}`" for kind in value[side]) or "nothing" for side in ("egress", "ingress")]
        rows.append((f"`{name}`", methods.get(name, "none"), *kinds))
    without = ((", ".join(each), why) for each, name, why in METHOD_RULESETS if not name)
    return "\n\n".join(
        [
            "# Rulesets",
            "`fedsilo policy init --ruleset NAME` and `silo init` write a site's policy from one of these, with limits "
            "that follow from the size of plan it is ready for. There is one for each set of message kinds that a "
            "method sends; `control` stands for the `control.*` kinds that the file lists.",
            markdown_table(("ruleset", "for", "a site sends", "a site takes in"), rows),
            "A policy names kinds, a run names a method: a message leaves only if the policy names its kind **and** "
            "the running method sends that kind (rules `kind` and `kind of the method`).",
            "`competence.answers` stands in no ruleset. A person adds the block where a method's option asks for it. "
            "The keys: [policy](policy.md).",
            *capacity_parts(),
            "## Methods without a ruleset",
            markdown_table(("method", "why"), without),
        ]
    )


# ---- messages ------------------------------------------------------------------------------------------


def messages_page() -> str:
    from fedsilo.protocol.kinds import INBOUND_KINDS, OUTBOUND_KINDS
    from policies.kind import FieldClass

    classes = [(f"`{each.value}`", _comment_of(FieldClass, each.name)) for each in FieldClass]
    return "\n\n".join(
        [
            "# Messages",
            "Everything that crosses between a silo and the coordinator is one of these kinds, polls and errors "
            "included. "
            "Each is signed (Ed25519) together with federation, run, round, step, attempt, kind, sender, sequence "
            "and the "
            "SHA-256 of its payload. A field that has no class is denied, in both directions.",
            "## Classes of fields",
            markdown_table(("class", "what it may hold"), classes),
            "## A silo sends",
            _kinds_table(OUTBOUND_KINDS),
            "## A silo takes in",
            _kinds_table(INBOUND_KINDS),
            "`lora.*`, `reft.*` and `global.adapter` are followed by the tensors' bytes, in the order of their names. "
            "The protobuf: [`federation.proto`](../../fedsilo/protocol/federation.proto).",
        ]
    )


def _kinds_table(kinds: dict[str, Any]) -> str:
    return markdown_table(
        ("kind", "fields: class"),
        ((f"`{kind}`", ", ".join(_fields_of(message.DESCRIPTOR)) or "none") for kind, message in kinds.items()),
    )


def _fields_of(message: Descriptor, prefix: str = "") -> Iterator[str]:
    from policies.kinds import field_class

    for field in message.fields:
        name = f"{prefix}{field.name}{'[]' if field.is_repeated else ''}"
        if field.message_type is not None:
            yield from _fields_of(field.message_type, f"{name}.")
        else:
            found = field_class(message.name, field.name)
            yield f"`{name}`: {found.value if found else 'DENIED'}"


def _comment_of(kind: type, name: str) -> str:
    """The comment behind `NAME = ...` in a class's source."""
    found = re.search(rf"^\s+{name} = \S+(?:\s+# (.+))?$", inspect.getsource(kind), flags=re.MULTILINE)
    return sentence(found.group(1) or "") if found else ""


# ---- audit record --------------------------------------------------------------------------------------


def audit_page() -> str:
    from fedsilo.audit import record

    what = inspect.cleandoc(record.__doc__ or "")
    return "\n\n".join(
        [
            "# Audit record",
            "A log is a folder `STATE_DIR/audit`: records, one JSON object a line; `checkpoints/`, signed; "
            "`witnessed/`, what this party has countersigned of others, and at the coordinator `shown/`, by which "
            "steps it came there; `keys/`, public keys. "
            "[`audit_verify.py`](../../fedsilo/audit/audit_verify.py) checks all of it and needs Python and the "
            "`cryptography` package only.",
            what,
            f"At most {record.TEXT_CHARACTERS_MAX} characters in a text, {record.LIST_ITEMS_MAX:,} items in a list, "
            f"{record.LINE_BYTES_MAX:,} bytes in a record.",
            "## Fields\n\nNo other field can be written.",
            ", ".join(f"`{name}`" for name in _record_fields(inspect.getsource(record))) + ".",
            "## Events\n\nNo other event can be written; some are reserved for what this version does not do yet.",
            ", ".join(f"`{name}`" for name in sorted(record.EVENTS)) + ".",
        ]
    )


def _record_fields(source: str) -> list[str]:
    """The keys of the module's table of fields, in its order."""
    for node in ast.parse(source).body:
        if not isinstance(node, ast.Assign | ast.AnnAssign) or not isinstance(node.value, ast.Dict):
            continue
        target = node.target if isinstance(node, ast.AnnAssign) else node.targets[0]
        if isinstance(target, ast.Name) and target.id == "_FIELDS":
            return [key.value for key in node.value.keys if isinstance(key, ast.Constant)]
    raise SystemExit("the table of record fields is not where it was")


# ---- who may give which command ------------------------------------------------------------------------

SIGNED_WITH = {"fedsilo audit show": "--payload", "fedsilo audit replay": "--rescreen"}  # only with it they are signed


def role_table() -> str:
    """Table of docs/operate/roles.md: commands that a person signs, and a column for each role that may sign one."""
    from certs.roles import ACTIONS, ROLES
    from fedsilo.cli.contract import COMMANDS

    signed = {name: facts.action for name, facts in COMMANDS.items() if facts.action}
    roles = [role for role in ROLES if any(role in ACTIONS[action] for action in signed.values())]
    lines = [f"| command | action | {' | '.join(roles)} |\n|---|---|{'---|' * len(roles)}\n"]
    for name, action in signed.items():
        command = f"{name} {SIGNED_WITH[name]}" if name in SIGNED_WITH else name
        cells = ("yes" if role in ACTIONS[action] else "" for role in roles)
        lines.append(f"| `{command}` | `{action}` | {' | '.join(cells)} |\n")
    return "".join(lines)


# ---- exit codes ----------------------------------------------------------------------------------------


def exit_codes_page() -> str:
    from fedsilo.cli.contract import BUG_EXIT_CODE, EXIT_MEANINGS, INTERRUPTED_EXIT_CODE
    from fedsilo.protocol import errors

    meanings = dict(re.findall(r"── (\w+Error)\s+\d+\s+(.+)", errors.__doc__ or ""))
    rows = [("0", "done, or the check passed", "none")]
    found = {
        name: kind
        for name, kind in vars(errors).items()
        if inspect.isclass(kind) and issubclass(kind, errors.FedSiloError) and kind is not errors.FedSiloError
    }
    for name, kind in sorted(found.items(), key=lambda item: item[1].exit_code):
        code = "the code that the peer is answered, from the list below" if kind is errors.PeerError else ""
        code = code or f"`{kind.default_code}`"
        rows.append((str(kind.exit_code), meanings[name], code))
    rows.append((str(BUG_EXIT_CODE), EXIT_MEANINGS[BUG_EXIT_CODE], "`BUG`"))
    rows.append((str(INTERRUPTED_EXIT_CODE), EXIT_MEANINGS[INTERRUPTED_EXIT_CODE], "none"))
    return "\n\n".join(
        [
            "# Exit codes",
            "The code in `error.code` may be more precise than the one here; the exit status does not change.",
            markdown_table(("exit", "meaning", "usual `error.code`"), rows),
            "## What one party may tell another\n\nOf an error only a code from this list crosses the wire, never a "
            "text:",
            ", ".join(f"`{each.value}`" for each in errors.WireCode) + ".",
        ]
    )


# ---- text ----------------------------------------------------------------------------------------------


def markdown_table(header: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    lines = [list(header), *([cell.replace("|", "\\|").replace("\n", " ") for cell in row] for row in rows)]
    lines.insert(1, ["---"] * len(lines[0]))
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def sentence(text: str | None) -> str:
    """With a full stop, if there is anything."""
    plain = inspect.cleandoc(text or "").strip()
    return plain if not plain or plain[-1] in ".!?:" else plain + "."


if __name__ == "__main__":
    sys.exit(main())
