"""Runs the demo on one machine: five sites with their own keys, a real run over mTLS, and its results.

Everything is what an operator would run by hand: the same certificates, configurations, policies and processes. The
demo only writes the files, presses the buttons and adds the figures up.
"""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedsilo.audit.audit_verify import verify_logs
from fedsilo.audit.consistency import LogSummary, compare, summarize
from fedsilo.audit.log import sent_by_kind
from fedsilo.audit.reader import typed_records
from fedsilo.audit.record import Record
from fedsilo.audit.transcripts import check_rounds
from fedsilo.control.client import ControlClient, Operator, sign_as
from fedsilo.demo.data import DataFolder, read_data_folder, write_digit_folder
from fedsilo.demo.processes import Child, Children
from fedsilo.demo.sites import (
    COORDINATOR_PERSON,
    FEDERATION,
    DemoSettings,
    Site,
    Sites,
    free_port,
    make_sites,
    run_text,
)
from fedsilo.files.durable import FOLDER_MODE
from fedsilo.files.extras import need
from fedsilo.protocol.errors import (
    ConflictError,
    FedSiloError,
    HeldError,
    OperationError,
    UnreachableError,
    UsageError,
    VerificationError,
)
from fedsilo.protocol.methods import method_named
from fedsilo.protocol.rounds import ROUND_DONE

if TYPE_CHECKING:  # both need libraries of the extra `demo`
    from fedsilo.demo.attacks import Attack, Hostile
    from fedsilo.demo.wire import Witness

# Chosen for a model of 0.3 M parameters; everything else is the plan's default.
ROUNDS = 3
LOCAL_STEPS = 20  # tau
SWAP_PERIOD = 2
PROMPTS_PER_STEP = 8
SAMPLES_PER_PROMPT = 8
LEARNING_RATE = 0.001
RANK = 16
ALPHA = 32.0
TEMPERATURE = 1.0
# Other people's text and a model that cannot read it: the path is asked for, not the learning.
TEXT_ROUNDS = 2
TEXT_LOCAL_STEPS = 2
TEXT_EVALUATION_PROMPTS = 32
EVALUATION_PROMPTS = 512
EVALUATION_SAMPLES = 4
HELD_SILO = "hospital_a"
POLL_SECONDS = 0.5
LINE_SECONDS = 4.0  # between lines of progress, unless something changed
ANSWER_MINUTES = 10.0
REMINDER_SECONDS = 60.0  # between lines that say how long a held release is still waited for

Say = Callable[[str], None]


@dataclass(frozen=True)
class DemoOptions:
    """Options of a demo.

    Attributes:
        out: empty folder for everything; it stays.
        local_steps: GRPO steps of a silo in a round; None for what the README's figures are made with.
        exchange: of answers to public prompts, step or round_end.
        data: folder of `fedsilo data`; None makes the demo's own set from `seed`.
        compare: a second method, run afterwards from the same start; empty for none.
        hold: hold hospital_a's first factor release for a person.
        answer_minutes: how long a held release is waited for once no console is open; then the demo ends.
        record: plant canaries, record every byte between silos and coordinator in the clear, and search it.
        attacks: what the last silo's trainer tries (`attacks.py`); anything here also records.
    """

    out: Path
    seed: int = 0
    silos: int = 4
    rounds: int | None = None
    local_steps: int | None = None
    method: str = "pubswap"
    exchange: str = "step"
    data: Path | None = None
    compare: str = ""
    hold: bool = False
    answer_minutes: float = ANSWER_MINUTES
    record: bool = False
    attacks: tuple[str, ...] = ()


def run_demo(options: DemoOptions, say: Say, *, attend: Callable[[Site], None] | None = None) -> Result:
    """Set up, run, stop, verify.

    Args:
        options: what to run.
        say: told one line of progress at a time.
        attend: called with the silo that holds a release, in the foreground, while the run goes on.

    Raises:
        ConflictError: `out` is not empty.
        HeldError: nobody answered a held release within `answer_minutes`.
        UsageError: an unknown method, an exchange that it has not, a comparison that the ruleset does not cover, or
            a library that is not installed.
        OperationError: a process did not start, or ended by itself.
    """
    need("torch", "transformers", *(("hpack", "hyperframe") if options.record or options.attacks else ()))
    method = method_named(options.method)
    if options.exchange not in method.exchanges:
        raise UsageError(
            f"{options.method} has no exchange {options.exchange!r}",
            hint=f"one of: {', '.join(sorted(method.exchanges))}",
        )
    if options.exchange != "step" and options.attacks:
        raise UsageError("--leak and --attack are made for --exchange step")
    own_set = options.data is None
    local_steps = options.local_steps or (LOCAL_STEPS if own_set else TEXT_LOCAL_STEPS)
    rounds = options.rounds or (ROUNDS if own_set else TEXT_ROUNDS)
    attacks: tuple[Attack, ...] = ()
    if options.attacks:
        from fedsilo.demo.attacks import check_attacks, named, rounds_needed

        attacks = named(options.attacks)
        silos = len(read_data_folder(options.data).private) if options.data else options.silos
        steps = local_steps // SWAP_PERIOD if "public.responses" in method.kinds else 0
        rounds = options.rounds or max(rounds, rounds_needed(attacks, public_steps=steps))
        check_attacks(
            attacks, rounds=rounds, silos=silos, method=options.method, kinds=method.kinds, public_steps=steps
        )
    if options.compare and method_named(options.compare).kinds - method.kinds:
        raise UsageError(f"--compare {options.compare} sends kinds that ruleset {method.ruleset} does not allow")
    if options.compare and attacks:
        raise UsageError("--compare does not go together with --leak and --attack")
    if options.out.exists() and any(options.out.iterdir()):
        raise ConflictError(f"{options.out} is not empty", hint="choose another --out, or remove it")
    data_folder = read_data_folder(options.data) if options.data is not None else None
    try:
        options.out.mkdir(mode=FOLDER_MODE, parents=True, exist_ok=True)
    except OSError as error:
        hint = "name a folder that you may write, with --out"
        raise UsageError(f"cannot make {options.out}: {error.strerror}", hint=hint) from error
    data, model = _set_up_inputs(options, data_folder, say)
    say("writing five sites: certificates, configurations, policies" if len(data.private) == 4 else "writing the sites")
    recorder_port = free_port() if options.record or attacks else 0
    sites = make_sites(
        DemoSettings(
            out=options.out,
            model=model,
            data=data,
            ruleset=method.ruleset,
            seed=options.seed,
            rank=RANK,
            alpha=ALPHA,
            holds=HELD_SILO if options.hold else "",
            local_steps=local_steps,
            swap_period=SWAP_PERIOD,
            prompts_per_step=PROMPTS_PER_STEP,
            samples_per_prompt=SAMPLES_PER_PROMPT,
            learning_rate=LEARNING_RATE,
            advertise=f"127.0.0.1:{recorder_port}" if recorder_port else "",
        )
    )
    witness: Witness | None = None
    hostile: Hostile | None = None
    if recorder_port:
        from fedsilo.demo.attacks import Hostile
        from fedsilo.demo.wire import Witness

        external = [sites.silos[-1].name] if attacks else []  # whose trainer the demo starts itself
        witness = Witness(sites, data, options.seed, options.out / "wire", port=recorder_port, external=external)
        hostile = Hostile(sites, attacks, witness.planted) if attacks else None
    fields: dict[str, object] = {
        "rounds": rounds,
        "local_steps": local_steps,
        "swap_period": SWAP_PERIOD,
        "prompts_per_step": PROMPTS_PER_STEP,
        "samples_per_prompt": SAMPLES_PER_PROMPT,
        "seed": options.seed,
        "objective": {"kl_coefficient": 0.0},
        "optimiser": {"learning_rate": LEARNING_RATE},
        "rollout": {
            "temperature": TEMPERATURE,
            "max_prompt_tokens": data.description.lengths.max_prompt_tokens,
            "max_new_tokens": data.description.lengths.max_new_tokens,
        },
        "evaluation": {
            "prompts": EVALUATION_PROMPTS if own_set else TEXT_EVALUATION_PROMPTS,
            "samples": EVALUATION_SAMPLES,
        },
    }
    # A run's name may leave; the control in it shows that what leaves is found.
    suffix = f"-{witness.planted.control}" if witness else ""
    started = time.monotonic()
    # One torch thread a silo: four silos with two threads each on two cores spin against each other.
    children = Children({"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"})
    try:
        if witness is not None:
            witness.start()
        processes = _start(children, sites, options.out / "logs", say, witness=witness, hostile=hostile)
        fields = {"method": options.method, "exchange": options.exchange, **fields}
        outcome = _carry_out(
            children, sites, fields, f"run-1{suffix}", say, attend=attend, answer_minutes=options.answer_minutes
        )
        compared = {}
        if options.compare:
            say(f"again from the same start with {options.compare}")
            known = method_named(options.compare).exchanges
            other = {"method": options.compare, "exchange": options.exchange if options.exchange in known else "step"}
            compared = _carry_out(
                children, sites, {**fields, **other}, f"run-2{suffix}", say, answer_minutes=options.answer_minutes
            )
        say("stopping")
    finally:
        killed = children.stop()
        if witness is not None:
            witness.stop()
    if killed:
        raise OperationError(f"{', '.join(killed)} had to be killed", hint=f"see {options.out / 'logs'}")
    seconds = time.monotonic() - started
    if witness is not None:
        say("searching what crossed for the planted texts")
    result = result_of(sites, outcome, compared, processes, seconds, witness=witness, hostile=hostile)
    result.data["base_model"] = str(model)
    return result


# ---- set-up ----------------------------------------------------------------------------------------


def _set_up_inputs(options: DemoOptions, data: DataFolder | None, say: Say) -> tuple[DataFolder, Path]:
    from fedsilo.demo.tiny_model import cache_folder, cached_model, recipe_for

    if data is None:
        say(f"making the demo's questions from seed {options.seed}")
        data = write_digit_folder(options.out / "data", options.seed, silos=options.silos)
    recipe = recipe_for(data.description.tokenizer)

    def progress(done: int, total: int) -> None:
        if done % max(1, total // 6) == 0 or done == total:
            say(f"building the base model (cached in {cache_folder()}): step {done} of {total}")

    return data, cached_model(recipe, progress=progress)


def _start(
    children: Children, sites: Sites, logs: Path, say: Say, *, witness: Witness | None, hostile: Hostile | None
) -> int:
    say("starting the coordinator")
    log = logs / "coordinator.log"
    arguments = ["coordinator", "start", "--config", str(sites.coordinator.config), "--json"]
    children.start("coordinator", arguments, log).ready()
    say(f"starting {len(sites.silos)} silos, each a guard and a trainer")
    silos = [_start_silo(children, site, logs, witness, hostile) for site in sites.silos]
    if hostile is not None:
        tries = ", ".join(attack.name for attack in hostile.attacks)
        say(f"{hostile.site.name}'s trainer is hostile: it tries {tries}")
        hostile.start_trainer(children, logs)
    levels = {str(silo.ready().get("isolation", "")) for silo in silos}
    processes = children.count()
    say(f"{processes} processes run; the trainers' isolation: {', '.join(sorted(levels)) or 'unknown'}")
    return processes


def _start_silo(children: Children, site: Site, logs: Path, witness: Witness | None, hostile: Hostile | None) -> Child:
    environment = witness.planted.environment(site.name) if witness else {}
    arguments = ["silo", "start", "--config", str(site.config), "--json"]
    may_end = hostile is not None and site is hostile.site
    return children.start(site.name, arguments, logs / f"{site.name}.log", environment=environment, may_end=may_end)


# ---- one run ---------------------------------------------------------------------------------------


def _carry_out(
    children: Children,
    sites: Sites,
    fields: dict[str, object],
    run: str,
    say: Say,
    *,
    attend: Callable[[Site], None] | None = None,
    answer_minutes: float = ANSWER_MINUTES,
) -> dict[str, Any]:
    """Submit a run as the coordinator's person and follow it to its end; returns its record.

    Raises:
        HeldError: a release was held, with no console open, and nobody answered it in time.
    """
    identities = sites.coordinator.folder / "id"
    person = Operator(
        sites.coordinator.name, identities / f"{COORDINATOR_PERSON}.crt", identities / f"{COORDINATOR_PERSON}.key",
        FEDERATION,
    )  # fmt: skip
    arguments = {"text": run_text({"run": run, **fields}), "source": "run.yaml"}
    with ControlClient(sites.coordinator.control_socket) as client:
        client.execute(sign_as(person, "run.submit", arguments))
        follow = Follow(sites, say, answer_minutes)
        try:
            while True:
                children.raise_for_dead()
                follow.read()
                if attend is not None and (holding := follow.holding()) is not None:
                    attend(holding)
                    attend = None
                    follow.read()
                summary = next(row for row in client.query("runs") if row["run"] == run)
                now = time.monotonic()
                follow.show(summary, now)
                if summary["state"] in {"finished", "failed", "aborted"}:
                    break
                follow.end_if_unanswered(now)
                time.sleep(POLL_SECONDS)
            follow.wait_until_idle(children)
        finally:
            follow.close()
        return dict(client.query("run", {"run": run})) | {"rows_left_out": follow.rows_left_out()}


def answer_commands(site: Site, releases: Sequence[str]) -> list[str]:
    """Commands for a person of that site at another terminal: the console, and the answer without one.

    They name our programs where this one runs from, since a new terminal has no virtual environment active.
    """
    programs, identities = Path(sys.executable).parent, site.folder / "id"
    console = [
        str(programs / "fedconsole"), "--socket", str(site.control_socket),
        "--operator-certificate", str(identities / "alice.crt"), "--operator-key", str(identities / "alice.key"),
    ]  # fmt: skip
    plain = [
        [str(programs / "silo"), "approvals", "approve", each, "--operator", "alice", "--config", str(site.config)]
        for each in releases
    ]
    return [shlex.join(words) for words in (console, *plain)]


class Follow:
    """Reads what each site shows its own people, and says it in a line.

    The reward is local to a silo and crosses no wire: the demo can show it because it owns every site's socket.
    """

    def __init__(self, sites: Sites, say: Say, answer_minutes: float = ANSWER_MINUTES) -> None:

        self._sites = sites
        self._say = say
        self._clients = {site.name: ControlClient(site.control_socket) for site in sites.silos}
        self._said: tuple[int, str] = (0, "")
        self._line = ""
        self._held: dict[str, list[str]] = {}
        self._answer_seconds = 60 * answer_minutes
        self._end_at = self._remind_at = 0.0
        self._next_line = 0.0
        self.local: dict[str, dict[str, Any]] = {}

    def show(self, summary: dict[str, Any], now: float) -> None:
        """Say where the run is, and what it waits for.

        Args:
            summary: the coordinator's of the run.
            now: seconds of a monotonic clock.
        """
        states = list(self.local.values())
        rewards = _values(states, "reward_mean")
        rates = _values(states, "pass_at_1")
        steps = [int(state.get("step") or 0) for state in states]
        out_bytes = sum(int(row["bytes"]) for state in states for row in state.get("left", ()))
        number = summary["round"]
        where = f"round {number} of {summary['rounds']}" if number else "every silo measures the base model first"
        parts = [f"{summary['method']}: {where}"]
        if any(steps):  # none while all load, evaluate or wait
            first, last = min(steps), max(steps)
            parts.append(f"step {first}" if first == last else f"step {first}-{last}")
        if rewards:
            parts.append(f"reward {sum(rewards) / len(rewards):.2f}")
        if rates:
            parts.append(f"pass@1 {sum(rates) / len(rates):.2f}")
        parts.append(f"out {out_bytes / 1e6:.1f} MB")
        line = " · ".join(parts)
        self._tell_held(now)
        moment = summary["round"], summary["state"]
        # while people are waited for nothing moves, and the same line again would only push the command away
        due = now >= self._next_line and line != self._line
        if moment != self._said or due:
            self._said, self._line = moment, line
            self._next_line = now + LINE_SECONDS
            self._say(line)

    def _tell_held(self, now: float) -> None:
        """Who holds what, and the commands that answer it: once, and again when it changes; then a line a minute."""
        held_releases = {
            site.name: [str(release["id"]) for release in self.local.get(site.name, {}).get("held", ())]
            for site in self._sites.silos
        }
        changed = False
        for site in self._sites.silos:
            releases = held_releases[site.name]
            if releases and releases != self._held.get(site.name, []):
                changed = True
                self._say(f"{site.name} holds {', '.join(releases)}, and the run waits until a person answers. Either")
                for command in answer_commands(site, releases):
                    self._say(f"  {command}")
                self._say("at another terminal answers it (`silo approvals reject` takes the same words and --reason)")
            elif not releases and self._held.get(site.name):
                self._say(f"{site.name} holds nothing any more")
        self._held = held_releases
        if changed:
            self._end_at, self._remind_at = now + self._answer_seconds, now + REMINDER_SECONDS
            self._say(f"without an answer this demo ends in {_minutes(self._answer_seconds)}, with exit status 9")
        elif any(held_releases.values()) and now >= self._remind_at:
            self._remind_at = now + REMINDER_SECONDS
            self._say(f"{self._waits_for()} is not answered yet: {_minutes(max(0.0, self._end_at - now))} are left")

    def _waits_for(self) -> str:
        return "; ".join(f"{', '.join(ids)} of {silo}" for silo, ids in self._held.items() if ids)

    def end_if_unanswered(self, now: float) -> None:
        """End a wait that takes too long. Raises HeldError: a held release has not been answered in time."""
        if any(self._held.values()) and now >= self._end_at:
            raise HeldError(
                f"{self._waits_for()} was not answered within {_minutes(self._answer_seconds)}: the demo ended, and "
                "what is held did not leave",
                hint="answer with A or R in the console of the next `fedsilo demo`; `--no-console` holds nothing",
            )

    def holding(self) -> Site | None:
        """The site of a silo that holds a release, if any."""
        return next((site for site in self._sites.silos if self.local.get(site.name, {}).get("held")), None)

    def wait_until_idle(self, children: Children, seconds: float = 30.0) -> None:
        """Wait until every silo that runs has recorded the end of the run; their logs hold it then."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            self.read()
            if not any(state.get("run") and children.running(name) for name, state in self.local.items()):
                return
            time.sleep(POLL_SECONDS / 5)

    def rows_left_out(self) -> dict[str, dict[str, int]]:
        """Return, by silo and reason, the rows that were not used, each counted where it was found."""
        counts: dict[str, dict[str, int]] = {}
        for name, state in self.local.items():
            dropped = state.get("trainer", {}).get("ready", {}).get("dropped", {})
            overlong = {f"over-long {part}": number for part, number in state.get("overlong", {}).items()}
            counts[name] = {reason: int(number) for reason, number in {**dropped, **overlong}.items() if number}
        return counts

    def close(self) -> None:
        for client in self._clients.values():
            client.close()

    def read(self) -> None:
        """Ask every site for its state."""
        for name, client in self._clients.items():
            try:
                self.local[name] = client.snapshot().state
            except (UnreachableError, OperationError):
                continue  # the process check tells when a silo is gone; until then the last state stands


def _minutes(seconds: float) -> str:
    return f"{seconds / 60:.0f} min" if seconds >= 60 else f"{seconds:.0f} s"


def _values(states: Sequence[dict[str, Any]], name: str) -> list[float]:
    values = (state.get("metrics", {}).get(name) for state in states)
    return [float(metric["value"]) for metric in values if metric is not None]


# ---- the result ------------------------------------------------------------------------------------------------


@dataclass
class Result:
    """Result of a demo; `data` is that of the reply to `fedsilo demo --json`."""

    data: dict[str, Any]
    record: dict[str, Any]
    sites: Sites
    compared: dict[str, Any] = field(default_factory=dict)
    error: FedSiloError | None = None


def result_of(
    sites: Sites,
    record: dict[str, Any],
    compared: dict[str, Any],
    processes: int,
    seconds: float,
    *,
    witness: Witness | None = None,
    hostile: Hostile | None = None,
) -> Result:
    """Add the figures up and check them against each other; everything has stopped.

    Args:
        sites: their logs are read.
        record: of the run.
        compared: of the second run; empty for none.
        processes: that ran.
        seconds: the runs took.
        witness: what crossed.
        hostile: the hostile trainer.
    """
    left, compared_left, disagreements = _what_left(sites, compared["run"] if compared else "")
    logs = [site.audit_log for site in sites.all()]
    verdicts = verify_logs(logs)
    check_rounds(verdicts, logs)
    names = {str(site.audit_log): site for site in sites.all()}
    audit = [
        {
            "log": "coordinator" if names[str(row["path"])] is sites.coordinator else names[str(row["path"])].name,
            "path": str(row["path"]),
            "verified": bool(row["verified"]),
            "problems": list(row.get("problems", ())),
        }
        for row in verdicts
    ]
    own = bool(record["plan"]) and method_named(record["plan"]["method"]).keeps_own
    data = {
        "run": record["run"],
        "state": record["state"],
        "method": record["plan"]["method"] if record["plan"] else "",
        **figures(record),
        "left": left,
        "audit": audit,
        "adapter": "" if own else str(Path(record["folder"]) / "adapter"),
        "run_record": str(Path(record["folder"]) / "run_record.json"),
        "rounds": [
            {"round": row["round"], "state": row["state"], "participants": row["participants"]}
            for row in record["rounds"]
        ],
        "donors_trained": _donors_trained(record),
        "isolation": record["isolation"],
        "rows_left_out": record["rows_left_out"],
        "seconds": round(seconds, 1),
        "processes": processes,
    }
    if compared:
        data["compared"] = {
            "method": compared["plan"]["method"],
            "state": compared["state"],
            "left": compared_left,
            **figures(compared),
        }
    error: FedSiloError | None = None
    unverified = [str(row["log"]) for row in audit if not row["verified"]]
    bad_rounds = [row["round"] for row in record["rounds"] if row["state"] not in ROUND_DONE]
    if unverified:
        error = _failed(f"the audit log of {', '.join(unverified)} does not verify", 7)
    elif disagreements:
        error = _failed(f"silo and coordinator do not tell the same: {'; '.join(disagreements)}", 7)
    elif record["state"] != "finished" or bad_rounds or (compared and compared["state"] != "finished"):
        error = _failed(f"the run ended as {record['state']}: {record['reason'] or bad_rounds or 'see the logs'}", 1)
    if witness is not None:
        error = _worse(error, _searched(sites, data, witness))
    if hostile is not None:
        error = _worse(error, _attacked(data, hostile))
    return Result(data, record, sites, compared, error)


def _searched(sites: Sites, data: dict[str, Any], witness: Witness) -> FedSiloError | None:
    from fedsilo.demo import wire as demo_wire

    verdict = witness.search()
    data |= demo_wire.figures(witness.planted, verdict)
    fault = demo_wire.fault(sites, verdict)
    return OperationError(fault, code="LEAKED" if verdict.found else "WIRE_NOT_PROVEN") if fault else None


def _attacked(data: dict[str, Any], hostile: Hostile) -> FedSiloError | None:
    from fedsilo.demo import attacks as demo_attacks

    data["attacks"] = hostile.verdicts()
    data["attacker"] = hostile.site.name
    data["not_stopped"] = demo_attacks.NOT_STOPPED
    code, why = demo_attacks.fault(data["attacks"], hostile.reached_coordinator(data["attacks"]))
    return OperationError(why, code=code) if code else None


def _worse(before: FedSiloError | None, after: FedSiloError | None) -> FedSiloError | None:
    """Return what got out comes before a log that does not verify, and that before everything else."""
    errors = [error for error in (before, after) if error is not None]
    return min(errors, key=lambda error: (error.code != "LEAKED", error.exit_code != 7), default=None)


def _failed(message: str, exit_code: int) -> FedSiloError:
    return VerificationError(message) if exit_code == 7 else OperationError(message)


def figures(record: dict[str, Any]) -> dict[str, Any]:
    """Return pass@1 before and after, in all, per silo and per topic (means over silos), from what the silos sent."""
    before = record["before"]["metrics"]
    after = record["rounds"][-1]["metrics"] if record["rounds"] else {}
    silos = sorted(set(before) & set(after))

    def mean(of: dict[str, Any], metric: str, topic: str) -> float:
        values = [of[silo][metric][topic] for silo in silos if topic in of[silo].get(metric, {})]
        return round(sum(values) / len(values), 4) if values else 0.0

    topics = sorted({topic for silo in silos for topic in after[silo].get("pass_at_1", {}) if topic})
    return {
        "pass_at_1": {"before": mean(before, "pass_at_1", ""), "after": mean(after, "pass_at_1", "")},
        "pass_at_1_greedy": {
            "before": mean(before, "pass_at_1_greedy", ""),
            "after": mean(after, "pass_at_1_greedy", ""),
        },
        "per_silo": {
            silo: {"before": before[silo]["pass_at_1"][""], "after": after[silo]["pass_at_1"][""]} for silo in silos
        },
        "per_topic": {
            topic: {"before": mean(before, "pass_at_1", topic), "after": mean(after, "pass_at_1", topic)}
            for topic in topics
        },
    }


def _what_left(sites: Sites, compared_run: str) -> tuple[list[dict[str, Any]], list[dict[str, Any]], list[str]]:
    """Counted from each silo's own audit log, and compared with what the coordinator's log says came in.

    Returns:
        What left for the run itself, what left from the first record of `compared_run` on, and which messages only
        one side's log has.
    """

    def summary(site: Site, records: Iterable[Record]) -> LogSummary:
        own = (site.audit_log / "keys" / "log.vkey").read_text(encoding="utf-8")
        return summarize(records, origin=own.partition("+")[0], name=site.name)

    receiver = summary(sites.coordinator, typed_records(sites.coordinator.audit_log))
    left: tuple[list[dict[str, Any]], list[dict[str, Any]]] = ([], [])
    disagreements = []
    for site in sites.silos:
        records = list(typed_records(site.audit_log))
        disagreements += compare(summary(site, records), receiver, under_way=False).differences
        own = list(takewhile(lambda record: not compared_run or record.run != compared_run, records))
        for rows, part in zip(left, (own, records[len(own) :]), strict=True):
            rows += [
                {"silo": site.name, "kind": kind, "messages": messages, "bytes": size}
                for kind, (messages, size) in sent_by_kind(part).items()
            ]
    return *left, disagreements


def _donors_trained(record: dict[str, Any]) -> dict[str, int]:
    """Donor answers that entered a step, by silo, over all rounds; `donors_sent` of the record is the other end."""
    totals = dict.fromkeys(record["plan"]["silos"], 0)
    for row in record["rounds"]:
        for silo, metrics in row["metrics"].items():
            totals[silo] += int(metrics.get("donors_trained", {}).get("", 0))
    return totals
