"""What a federation leaves on disk, kept for later versions to read: `python -m tools.vectors --out tests/vectors`.

    NAME.tar.xz                two silos and their coordinator after two runs; `held/`, the same three while the first
                               update of run-1 waited for a person; model and data; what consoles recorded
    NAME.answers.jsonl.xz      what the daemons answer that are started on them; a question of `tools.vector_questions`
                               a line

Everything is what an operator would do by hand: the sites of `fedsilo demo` with a smaller model, the same daemons,
signed commands. In run-1 hospital_a's first update is held, all daemons are stopped and started again, alice reads the
findings and approves. In run-2 she puts her answer off, then rejects, and the run is aborted. Afterwards, a word of two
transcripts is written into the ledger of held/hospital_b, so that it is halted.

The archive holds private keys. They were made for it and for nothing else, their certificates ended within days, and
they are worth nothing: they are there since a daemon that is started on these folders reads them.
`--answers-only` asks again, where a change of answers is wanted: the commit says which fields, and why.
Does not make: a denied message, a silo that exchanges files.
"""

from __future__ import annotations

import argparse
import lzma
import os
import shutil
import sys
import tarfile
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from console.recording import Recorder, RecordingFile
from fedsilo.control.client import ControlClient, Operator, sign_as
from fedsilo.demo.data import write_digit_folder
from fedsilo.demo.playing import RECORDING
from fedsilo.demo.processes import Children
from fedsilo.demo.sites import FEDERATION, DemoSettings, Site, Sites, make_sites, run_text
from fedsilo.demo.tiny_model import Recipe, build_model
from fedsilo.protocol.errors import ConflictError, FedSiloError
from silo.guard.ledger import Ledger
from tests import answers
from tools import vector_questions

ROOT = Path(__file__).resolve().parents[1]
# Small enough for an archive: what is kept is the form of things, not what was learnt.
MODEL = Recipe("digits", hidden=32, intermediate=64, layers=2, heads=2, steps=60, batch=64)
SILOS, ROWS, RANK, SEED = 2, 48, 4, 5
HOLDS = "hospital_a"
LOCAL_STEPS, SWAP_PERIOD = 4, 2
LIMIT_SECONDS, LOOK_SECONDS = 300.0, 0.3
RUN: dict[str, object] = {
    "method": "pubswap",
    "rounds": 2,
    "local_steps": LOCAL_STEPS,
    "swap_period": SWAP_PERIOD,
    "prompts_per_step": 4,
    "samples_per_prompt": 4,
    "seed": SEED,
    "objective": {"kl_coefficient": 0.0},
    "optimiser": {"learning_rate": 0.001},
    "rollout": {"temperature": 1.0, "max_prompt_tokens": 8, "max_new_tokens": 6},
    "evaluation": {"prompts": 16, "samples": 1},
}
PARTIES = ("hospital_a", "coordinator", "held/hospital_a", "held/coordinator", "held/hospital_b")
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}


@dataclass
class Federation:
    """A coordinator and its silos, their daemons started and stopped by hand."""

    root: Path
    sites: Sites
    children: Children = field(default_factory=lambda: Children(dict(ENVIRONMENT)))

    def start(self) -> None:
        logs = self.root.parent / "logs"
        for site in (self.sites.coordinator, *self.sites.silos):
            program = "coordinator" if site is self.sites.coordinator else "silo"
            arguments = [program, "start", "--config", str(site.config), "--json"]
            self.children.start(site.name, arguments, logs / f"{site.name}.log").ready()

    def stop(self) -> None:
        if killed := self.children.stop():
            raise SystemExit(f"{killed} had to be killed")

    def silo(self, name: str) -> Site:
        return next(site for site in self.sites.silos if site.name == name)

    def order(self, site: Site, person: str, name: str, arguments: Mapping[str, Any]) -> Any:
        identities = site.folder / "id"
        signer = Operator(site.name, identities / f"{person}.crt", identities / f"{person}.key", FEDERATION)
        with ControlClient(site.control_socket) as client:
            return client.execute(sign_as(signer, name, arguments))

    def until(self, site: Site, holds: Callable[[Mapping[str, Any]], bool]) -> Mapping[str, Any]:
        """Wait until a daemon's snapshot says so."""
        end = time.monotonic() + LIMIT_SECONDS
        with ControlClient(site.control_socket) as client:
            while time.monotonic() < end:
                self.children.raise_for_dead()
                if holds(state := client.snapshot().state):
                    return state
                time.sleep(LOOK_SECONDS)
        raise SystemExit(f"{site.name} did not come to it")

    def held(self) -> Mapping[str, Any]:
        """The release that a person of hospital_a is asked for."""
        state = self.until(self.silo(HOLDS), lambda state: bool(state.get("held")))
        return dict(state["held"][0])

    def submit(self, run: str) -> None:
        text = run_text({"run": run, **RUN})
        self.order(self.sites.coordinator, "carol", "run.submit", {"text": text, "source": "run.yaml"})

    def until_ended(self, run: str, *, approve: bool = False) -> None:
        """Wait until a run is over at all parties; meanwhile, where it is wanted, alice approves what is held."""

        def ended(state: Mapping[str, Any]) -> bool:
            if approve:
                self.approve_held()
            return any(row["run"] == run and row["ended_at"] for row in state["runs"])

        self.until(self.sites.coordinator, ended)
        for site in self.sites.silos:
            self.until(site, lambda state: not state["run"])

    def approve_held(self) -> None:
        """Every finding of what is held now is read, and it is approved."""
        site = self.silo(HOLDS)
        with ControlClient(site.control_socket) as client:
            held = client.snapshot().state.get("held", ())
        for release in held:
            read = [finding["id"] for finding in release.get("noticed", [])]
            yes = {"shown": release["shown"], "acknowledged": read}
            with suppress(ConflictError):  # it is settled meanwhile
                self.order(site, "alice", "approvals.approve", _shown(release) | yes)


@contextmanager
def recording(federation: Federation, folder: Path) -> Iterator[None]:
    """Record with local data, as `fedconsole --record` does, what each daemon shows while the block runs."""
    folder.mkdir(exist_ok=True)
    ended = threading.Event()

    def look(site: Site, file: RecordingFile) -> None:
        questions = vector_questions.of_recording("coordinator" if site is federation.sites.coordinator else "silo")
        with ControlClient(site.control_socket) as client:
            recorder = Recorder(client, file)
            while not ended.wait(LOOK_SECONDS):
                with suppress(FedSiloError):  # also that a question was refused is in it
                    held = recorder.snapshot().state.get("held", ())
                    further = [("approval", {"release": release["id"]}) for release in held]
                    for name, arguments in (*questions, *further):
                        with suppress(FedSiloError):
                            recorder.query(name, arguments)

    def listen(site: Site, file: RecordingFile) -> None:
        with ControlClient(site.control_socket) as client, suppress(FedSiloError):
            for _ in Recorder(client, file).watch():
                if ended.is_set():
                    return

    with ExitStack() as stack:
        threads = []
        for site in (federation.silo(HOLDS), federation.sites.coordinator):
            file = RecordingFile(folder / f"{site.name}.fedrec", include_local=True)
            stack.callback(file.close)
            threads.append(threading.Thread(target=look, args=(site, file)))
            threading.Thread(target=listen, args=(site, file), daemon=True).start()
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            ended.set()
            for thread in threads:
                thread.join()


def make(root: Path) -> None:
    """Run the federation below `root`, an empty folder, and leave there what is kept."""
    build_model(MODEL, root / "model")
    data = write_digit_folder(root / "data", SEED, silos=SILOS, rows_per_silo=ROWS)
    sites = make_sites(
        DemoSettings(
            out=root,
            model=root / "model",
            data=data,
            ruleset="pubswap",
            seed=SEED,
            rank=RANK,
            alpha=2.0 * RANK,
            holds=HOLDS,
            local_steps=LOCAL_STEPS,
            swap_period=SWAP_PERIOD,
            prompts_per_step=4,
            samples_per_prompt=4,
            learning_rate=0.001,
        )
    )
    federation = Federation(root, sites)
    held = federation.silo(HOLDS)
    try:
        federation.start()
        federation.submit("run-1")
        federation.held()
        federation.stop()
        for site in sites.all():
            shutil.copytree(site.folder, root / "held" / site.folder.name, ignore=_passing)
        federation.start()
        with recording(federation, root / "recordings"):
            federation.until_ended("run-1", approve=True)
            federation.submit("run-2")
            release = federation.held()
            later = {"until_seconds": time.time() + 3600.0}
            federation.order(held, "alice", "approvals.defer", _shown(release) | later)
            time.sleep(4 * LOOK_SECONDS)  # so that the recordings show it
            why = {"reason_code": "TIMING", "reason": "the ward is not told yet"}
            federation.order(held, "alice", "approvals.reject", _shown(release) | why)
            federation.order(sites.coordinator, "carol", "run.abort", {"run": "run-2"})
            federation.until_ended("run-2")
    finally:
        federation.stop()
    shutil.copy(RECORDING, root / "recordings")
    _tell_of_two_transcripts(root / "held" / "hospital_b")
    for file in (*root.rglob("silo.yaml"), *root.rglob("coordinator.yaml")):
        # relative to the file's own folder, so that the daemons start wherever the archive is unpacked; and on any free
        # port, to a place where nobody listens
        above = "/".join([".."] * len(file.parent.relative_to(root).parts))
        text = file.read_text(encoding="utf-8").replace(f"{root}/", f"{above}/")
        port = 0 if file.name == "coordinator.yaml" else 1
        file.write_text(text.replace(sites.listen, f"127.0.0.1:{port}"), encoding="utf-8")


def _tell_of_two_transcripts(folder: Path) -> None:
    """Halt a silo as if another one had signed a second transcript of round 1: nobody here is dishonest."""
    ledger = Ledger(folder / "state" / "ledger.sqlite3")
    known, shown = (
        {"sha256": digit * 64, "party": f"spiffe://demo/{party}", "signature": digit * 128}
        for digit, party in (("a", "coordinator/main"), ("b", "silo/hospital_a"))
    )
    message = f"hospital_a signed {'b' * 12} as the transcript of round 1 of run run-1; this silo was shown {'a' * 12}"
    told = {"run": "run-1", "round": 1, "sequence": 0, "known": known, "shown": shown, "message": message}
    ledger.keep_equivocation({**told, "since": answers.records_of(folder)[-1]["t"] / 1000, "recorded": False})
    ledger.close()


def _shown(release: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "release": release["id"],
        "digest": release["digest"],
        "policy_digest": release["policy"]["digest"],
        "revision": release["revision"],
    }


def _passing(folder: str, names: list[str]) -> set[str]:
    """What a daemon makes anew at each start."""
    return {name for name in names if (Path(folder) / name).is_socket()} | (
        {"lock", "run", "scratch", "reserve"} & set(names)
    )


def pack(root: Path, archive: Path) -> None:
    """Write it as NAME.tar.xz with NAME as its only folder, nobody as the owner."""

    def plain(entry: tarfile.TarInfo) -> tarfile.TarInfo | None:
        entry.uid = entry.gid = 0
        entry.uname = entry.gname = "root"
        return entry

    name = archive.name.partition(".")[0]
    with (
        lzma.open(archive, "wb", preset=9 | lzma.PRESET_EXTREME) as stream,
        tarfile.open(mode="w", fileobj=stream) as tar,
    ):
        for path in sorted(root.rglob("*")):
            relative = path.relative_to(root)
            if path.is_socket() or _passing(str(path.parent), list(relative.parts)) or "__pycache__" in relative.parts:
                continue
            tar.add(path, f"{name}/{relative}", recursive=False, filter=plain)


def _changed(before: list[answers.Answer], given: list[answers.Answer]) -> Iterator[str]:
    """What a commit that changes answers is about. A question may be asked again, after an order: they go in turn."""
    former: dict[tuple[answers.Party, str, str], list[str]] = {}
    for one in before:
        former.setdefault((one.party, one.name, repr(one.arguments)), []).append(one.text)
    for one in given:
        texts = former.get((one.party, one.name, repr(one.arguments)), [])
        asked = f"{one.party.folder} {one.name or 'state'} {one.arguments}"
        changes = answers.differences(texts.pop(0), one.text) if texts else ["was not asked before"]
        yield from (f"{asked} {change}" for change in changes)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "tests" / "vectors")
    parser.add_argument("--name", default="before_folders")
    parser.add_argument("--answers-only", action="store_true", help="ask the daemons of the archive that is there")
    options = parser.parse_args()
    archive = options.out / f"{options.name}.tar.xz"
    os.environ.update(ENVIRONMENT)
    if not options.answers_only:
        with tempfile.TemporaryDirectory(prefix="fedsilo-vectors-") as folder:
            root = Path(folder) / "v"
            root.mkdir()
            make(root)
            pack(root, archive)
        print(archive)
    with tempfile.TemporaryDirectory(prefix="fv") as folder:
        root = answers.unpacked(archive, Path(folder))
        # a minute after the last record: what was held is held still, and no certificate has ended
        parties = [answers.Party(name, answers.records_of(root / name)[-1]["t"] // 1000 + 60.0) for name in PARTIES]
        with answers.running(root, parties) as daemons:
            given = [
                answers.Answer(daemon.party, name, arguments, daemon.answer(name, arguments))
                for daemon in daemons.values()
                for name, arguments in vector_questions.of_daemon(daemon)
            ]
    file = options.out / f"{options.name}.answers.jsonl.xz"
    for line in _changed(answers.kept_answers(file) if file.exists() else [], given):
        print(line)
    answers.keep_answers(file, given)
    print(file)
    return 0


if __name__ == "__main__":
    sys.exit(main())
