"""Bad input, line by line, against the real commands and daemons: what is refused, in which words, with which code."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import socket
import ssl
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

import pytest

from fedsilo.launch.demo_data import write_digit_folder
from fedsilo.launch.demo_sites import SILO_PEOPLE, Wanted, free_port, make_sites
from fedsilo.launch.provision import enrol, enrol_operator, init_ca, write_roles
from fedsilo.launch.tiny_model import cached_model, recipe_for
from silo.guard.channel import connection_fault
from silo.guard.messages import TlsFiles

LIMIT_SECONDS = 120.0  # a limit that is reached means that something hangs
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
ROOT = Path(__file__).parents[2]
HASH = r"[0-9a-f]{64}"


@dataclass(frozen=True)
class Done:
    exit_code: int
    stdout: str
    stderr: str

    @property
    def error(self) -> str:
        """The one line that says what was wrong; nothing may look like a traceback."""
        assert "Traceback" not in self.stderr + self.stdout
        (line,) = [line for line in self.stderr.splitlines() if line.startswith("error: ")]
        assert re.search(r" \[[A-Z_0-9]+\]$", line)
        return line

    @property
    def hint(self) -> str:
        return next((line for line in self.stderr.splitlines() if line.startswith("hint: ")), "")


def command(*arguments: object) -> Done:
    done = subprocess.run(
        [sys.executable, "-m", "fedsilo.launch", *map(str, arguments)],
        stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=LIMIT_SECONDS, check=False, env=ENVIRONMENT,
    )  # fmt: skip
    return Done(done.returncode, done.stdout, done.stderr)


@dataclass
class Daemon:
    """A daemon in the foreground of its own process; what it says on stderr is read line by line."""

    process: subprocess.Popen[str]
    said: list[str] = field(default_factory=list)

    def ready(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert "ready" in line, self.ended().stderr
        return line

    def until(self, words: str) -> str:
        """The next line on stderr that holds the words."""
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.said.append(line)
            if words in line:
                return line
        raise AssertionError(f"{words!r} was not said: {''.join(self.said)}")

    def ended(self) -> Done:
        stdout, stderr = self.process.communicate(timeout=LIMIT_SECONDS)
        return Done(self.process.returncode, stdout, "".join(self.said) + stderr)


@contextlib.contextmanager
def daemon(*arguments: object) -> Iterator[Daemon]:
    process = subprocess.Popen(
        [sys.executable, "-m", "fedsilo.launch", *map(str, arguments)],
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT,
    )  # fmt: skip
    watchdog = threading.Timer(LIMIT_SECONDS, process.kill)
    watchdog.start()
    try:
        yield Daemon(process)
    finally:
        watchdog.cancel()
        process.terminate()
        process.communicate()


@dataclass(frozen=True)
class Place:
    """One federation on disk: two silos, a coordinator, a model, data. The path is short: sockets lie below it."""

    root: Path

    @property
    def config(self) -> Path:
        return self.root / "hospital_a" / "silo.yaml"

    @property
    def policy(self) -> Path:
        return self.root / "hospital_a" / "policy.yaml"

    @property
    def coordinator(self) -> Path:
        return self.root / "coordinator" / "coordinator.yaml"

    @property
    def private(self) -> Path:
        return self.root / "data" / "private" / "hospital_a.jsonl"

    @property
    def state(self) -> Path:
        return self.root / "hospital_a" / "state"

    def start(self) -> Done:
        return command("silo", "start", "--config", self.config)


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert len(re.findall(old, text, re.M)) == 1, f"{old} in {path}"
    path.write_text(re.sub(old, new, text, flags=re.M))


@pytest.fixture(scope="module")
def origin() -> Iterator[Place]:
    with tempfile.TemporaryDirectory(prefix="fs", dir="/tmp") as folder:  # a socket's path must be short
        root = Path(folder)
        data = write_digit_folder(root / "data", 1, silos=2)
        shutil.copytree(cached_model(recipe_for("digits")), root / "model")
        make_sites(
            Wanted(
                out=root,
                model=root / "model",
                data=data,
                ruleset="pubswap",
                seed=1,
                rank=4,
                alpha=8.0,
                holds="",
                local_steps=4,
                swap_period=2,
                prompts_per_step=4,
                samples_per_prompt=4,
                learning_rate=1e-3,
            )
        )
        yield Place(root)


@pytest.fixture
def place(origin: Place) -> Iterator[Place]:
    """A copy of its own, with a free port."""
    with tempfile.TemporaryDirectory(prefix="fs", dir="/tmp") as folder:  # a socket's path must be short
        root = Path(folder)
        shutil.copytree(origin.root, root, dirs_exist_ok=True)
        for path in root.glob("*/*.yaml"):
            text = path.read_text().replace(str(origin.root), str(root))
            path.write_text(re.sub(r"127\.0\.0\.1:\d+", f"127.0.0.1:{_port_of(root)}", text))
        yield Place(root)


_ports: dict[Path, int] = {}


def _port_of(root: Path) -> int:
    return _ports.setdefault(root, free_port())


# ---- policy ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("old", "new", "error", "hint"),
    [
        ("^mode: enforce", "mode: enforce\ncolour: red", r":6: unknown key 'colour' \[", "known keys here: approval_"),
        ("^name: pubswap", "name: a\nname: pubswap", r":5: key 'name' stands twice \[", "first at line 4"),
        ("min_peers: 2", "min_peers: 1e-6", r":15: '1e-6' is a string in YAML, not a number \[", "write 1.0e-6"),
        ("^mode: enforce", "mode: no", r":5: 'no' is ambiguous in YAML \[", "write true or false, or quote it"),
    ],
)
def test_T35_a_policy_with_a_mistake_names_file_line_and_mend(
    place: Place, old: str, new: str, error: str, hint: str
) -> None:
    edit(place.policy, old, new)
    done = place.start()
    assert done.exit_code == 2
    assert re.match(f"error: {re.escape(str(place.policy))}{error}", done.error)
    assert done.hint.startswith(f"hint: {hint}")


@pytest.mark.parametrize("bare", [False, True])
def test_T34_without_a_policy_of_its_own_a_silo_does_not_start(place: Place, bare: bool) -> None:
    place.policy.unlink()
    if bare:
        shutil.copyfile(ROOT / "policies" / "rulesets" / "pubswap.yaml", place.policy)
    done = place.start()
    assert done.exit_code == 2
    assert ("bare ruleset, without the site's own federation" if bare else "there is no policy file") in done.error
    assert "fedsilo policy init --ruleset pubswap --model DIR --public FILE --federation BUNDLE" in done.hint
    assert not (place.state / "audit").exists()


# ---- configuration -----------------------------------------------------------------------------------


def test_T35_a_configuration_with_an_unknown_key_names_its_line(place: Place) -> None:
    for path, program, line in ((place.config, "silo", 7), (place.coordinator, "coordinator", 5)):
        edit(path, "^federation: demo", "federation: demo\nlunch: soup")
        done = command(program, "start", "--config", path)
        assert done.exit_code == 2
        assert f"{path}:{line}: unknown key 'lunch' [INVALID_INPUT]" in done.error
        assert "federation" in done.hint
        assert " source" not in done.hint  # not a key of the file


def test_a_socket_path_that_the_kernel_cannot_take_is_named(place: Place) -> None:
    for path, program in ((place.config, "silo"), (place.coordinator, "coordinator")):
        edit(path, "^state_dir: .*", f"state_dir: {'d' * 110}")
        done = command(program, "start", "--config", path)
        assert done.exit_code == 2
        assert re.search(r"\.yaml:\d+: .*\.sock is longer than 107 bytes \[INVALID_INPUT\]$", done.error)
        assert "shorter state_dir" in done.hint


def test_a_configuration_that_is_not_there(place: Place) -> None:
    done = command("silo", "start", "--config", place.root / "none.yaml")
    assert (done.exit_code, "does not exist [NOT_FOUND]" in done.error) == (8, True)


# ---- files that do not fit ----------------------------------------------------------------------------


def test_a_public_set_with_another_hash_than_the_pinned_one_is_refused_at_both_ends(place: Place) -> None:
    public = place.root / "data" / "public.jsonl"
    with public.open("a") as file:
        file.write('{"id":"more","prompt":"1","answer":"1","topic":"rotate"}\n')
    for done in (place.start(), command("coordinator", "start", "--config", place.coordinator)):
        assert done.exit_code == 2
        assert re.search(rf"public set {public} has SHA-256 {HASH}; \w+.yaml says {HASH} \[PUBLIC_SET_MISM", done.error)
    got = re.search(HASH, done.error)
    assert got
    edit(place.config, r'(?<=public.jsonl"\n    sha256: ")\w+', got[0])  # the configuration agrees, the policy does not
    done = place.start()
    assert done.exit_code == 2
    assert re.search(rf"has SHA-256 {got[0]}; the policy {place.policy} pins public: {HASH} \[PUBLIC_SET_", done.error)


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json"])
def test_a_model_folder_that_lacks_a_file_is_refused_naming_it(place: Place, name: str) -> None:
    (place.root / "model" / name).unlink()
    done = place.start()
    assert done.exit_code == 2
    assert f"{place.root / 'model'}: the model folder lacks {name} [" in done.error


def test_a_model_folder_without_its_tokenizer_settings_is_another_model(place: Place) -> None:
    (place.root / "model" / "tokenizer_config.json").unlink()
    done = place.start()
    assert done.exit_code == 2
    assert re.search(rf"tokenizer_sha256 is {HASH}; .*policy.yaml:\d+ pins {HASH} \[MODEL_MISMATCH\]", done.error)


# ---- private data --------------------------------------------------------------------------------------


def spoil(place: Place, unreadable: int) -> None:
    """Four kinds of bad lines behind 400 good ones; answers become numbers, so that one can be unreadable."""
    lines = place.private.read_text().splitlines()
    first = json.loads(lines[0])
    lines += ['{"id": broken', json.dumps({"id": "q", "prompt": "x", "topic": "t"}), lines[0]]
    lines += [json.dumps({**first, "id": f"u{index}", "answer": "zz"}) for index in range(unreadable)]
    place.private.write_text("\n".join(lines) + "\n")
    edit(place.config, r"(?<=hospital_a.jsonl\"\]\n  verifier: )exact", "numeric")


LISTED = (
    "line 401: broken JSON; line 402: missing field 'answer'; line 403: duplicate id; "
    "line 404: unparseable reference answer"
)


def test_a_few_bad_private_lines_are_counted_and_listed_and_people_are_told_no(place: Place) -> None:
    """One running silo: bad lines, a second daemon on its state, people who may not, and the socket it leaves."""
    spoil(place, 1)
    folder = place.root / "hospital_a"
    enrol_operator(folder / "site_ca", folder / "id", "dave")
    write_roles(folder / "id", "hospital_a", {**SILO_PEOPLE, "dave": ["viewer"]})
    with daemon("silo", "start", "--config", place.config) as silo:
        ready = silo.ready()
        assert ready.startswith("ready: hospital_a of demo") and "private 400 rows, 4 lines left out" in ready
        log = (place.state / "logs" / "guard.log").read_text()
        assert f"WARNING hospital_a private lines left out: {place.private}: {LISTED}" in log
        done = command("silo", "status", "--config", place.config)
        counted = "1 broken JSON, 1 missing field 'answer', 1 duplicate id, 1 unparseable reference answer"
        assert f"400 rows, 4 lines left out ({counted}): `silo check` lists them" in done.stdout

        second = place.start()
        assert second.exit_code == 6
        assert f"{place.state}/lock is held by process {silo.process.pid} [CONFLICT]" in second.error
        assert "two at once would fork the state" in second.hint

        may_not = command("silo", "stop", "--operator", "dave", "--config", place.config)
        assert may_not.exit_code == 4
        assert "dave" in may_not.error and "[NOT_ALLOWED]" in may_not.error
        nobody = command("silo", "stop", "--operator", "eve", "--config", place.config)
        assert nobody.exit_code == 8 and "eve.crt does not exist" in nobody.error
        assert command("silo", "stop", "--operator", "alice", "--config", place.config).exit_code == 0
        assert silo.ended().exit_code == 0
    gone = command("silo", "status", "--config", place.config)
    assert gone.exit_code == 3
    assert "control.sock: the socket does not exist [UNREACHABLE]" in gone.error
    stale = socket.socket(socket.AF_UNIX)
    stale.bind(str(place.state / "control.sock"))  # as a killed daemon leaves it
    stale.close()
    gone = command("silo", "status", "--config", place.config)
    assert gone.exit_code == 3 and "nothing listens there [UNREACHABLE]" in gone.error
    done = command("silo", "check", "--offline", "--config", place.config)
    assert done.exit_code == 0
    assert f"warning: {place.private}: {LISTED}" in done.stderr


def test_too_many_bad_private_lines_end_the_start_and_the_check(place: Place) -> None:
    spoil(place, 40)
    done = place.start()
    assert done.exit_code == 2
    assert f"43 of 443 lines are bad, the limit is under 5%: {LISTED}; " in done.error
    assert "and 33 more [TASK_FILE_INVALID]" in done.error
    assert '{"id","prompt","answer","topic"}' in done.hint
    assert "zz" not in done.stderr  # reasons, never content
    assert "ended: the trainer refuses to configure" in (place.state / "logs" / "guard.log").read_text()
    done = command("silo", "check", "--offline", "--config", place.config)
    assert done.exit_code == 1 and "43 of 443 lines are bad" in done.error and "[TASK_FILE_INVALID]" in done.error


# ---- joining --------------------------------------------------------------------------------------------


def test_a_silo_with_another_tokenizer_or_load_type_is_refused_at_join_with_both_values_at_both_ends(
    place: Place,
) -> None:
    other = place.root / "model_b"
    shutil.copytree(place.root / "model", other)
    settings = json.loads((other / "tokenizer_config.json").read_text())
    (other / "tokenizer_config.json").write_text(json.dumps({**settings, "note": "another"}))
    edit(place.config, f'"{place.root}/model"', f'"{other}"')
    seen = re.search(rf"tokenizer_sha256 is ({HASH}); .* pins ({HASH})", place.start().error)
    assert seen
    got, expected = seen.groups()
    place.policy.write_text(place.policy.read_text().replace(expected, got))  # the site agrees with itself
    second = place.root / "hospital_b" / "silo.yaml"
    edit(second, "load: fp32", "load: bf16")

    with daemon("coordinator", "start", "--config", place.coordinator) as coordinator:
        coordinator.ready()
        with ThreadPoolExecutor(2) as both:
            tokenizer = both.submit(place.start)
            load = both.submit(command, "silo", "start", "--config", second)
        assert tokenizer.result().exit_code == 1
        assert f"tokenizer_sha256: it expects {expected}, here it is {got} [TOKENIZER_MIS" in tokenizer.result().error
        assert load.result().exit_code == 1
        assert "load: it expects fp32, here it is bf16 [LOAD_MISMATCH]" in load.result().error
        listed = command("coordinator", "silos", "list", "--config", place.coordinator).stdout
        assert f"TOKENIZER_MISMATCH: tokenizer_sha256 expected {expected}, got {got}" in listed
        assert "LOAD_MISMATCH: load expected fp32, got bf16" in listed
        coordinator.process.terminate()
        said = coordinator.ended().stderr
    assert f"refused spiffe://demo/silo/hospital_a: tokenizer_sha256 differs: expected {expected}, got {got} [T" in said
    assert "refused spiffe://demo/silo/hospital_b: load differs: expected fp32, got bf16 [LOAD_MISMATCH]" in said
    assert f"here it is {got} [TOKENIZER_MISMATCH]" in (place.state / "logs" / "guard.log").read_text()


# ---- certificates ---------------------------------------------------------------------------------------


def test_T28_a_wrong_ca_and_T26_an_expired_certificate_are_refused_with_a_line_at_both_ends(place: Place) -> None:
    root, address = place.root, f"127.0.0.1:{_port_of(place.root)}"
    init_ca(root / "strangers", name="demo", kind="federation")
    enrol(root / "strangers", root / "stranger", "silo/hospital_a")
    enrol(root / "federation_ca", root / "late", "silo/hospital_a", lifetime=timedelta(milliseconds=1))
    trust = root / "federation_ca" / "ca.crt"
    with daemon("coordinator", "start", "--config", place.coordinator) as coordinator:
        coordinator.ready()

        def refused(folder: str, trusted: Path = trust) -> tuple[str, str]:
            files = TlsFiles(root / folder / "hospital_a.crt", root / folder / "hospital_a.key", trusted)
            return connection_fault(address, files), coordinator.until("refused a connection in the TLS handshake")

        ours, theirs = refused("stranger")
        assert f"does not accept this silo's certificate {root}/stranger/hospital_a.crt (wrong CA, expired" in ours
        assert "its certificate is not signed by this federation's CA (wrong CA)" in theirs
        ours, theirs = refused("late")
        assert re.search(r"does not accept .*late/hospital_a.crt \(expired since 20\d\d-.*Z\)", ours)
        assert "its certificate is expired" in theirs
        ours, theirs = refused("stranger", root / "strangers" / "ca.crt")
        assert "its certificate is not signed by the CA in" in ours and "(wrong CA)" in ours
        assert "it broke off; it may not accept this coordinator's certificate" in theirs

        # the counterpart: the right certificate, as a command
        joined = command("silo", "join", "--config", place.config)
        assert joined.exit_code == 0 and "key as pinned" in joined.stdout
        events = command("coordinator", "logs", "--config", place.coordinator).stdout
        assert "connection.refused cause=its certificate is expired" in events
        coordinator.process.terminate()
        done = coordinator.ended()
        assert done.exit_code == 0 and "ssl_transport_security" not in done.stderr


def test_T26_a_silo_whose_own_certificate_is_expired_or_of_another_ca_does_not_start(place: Place) -> None:
    identities = place.root / "hospital_a" / "id"
    init_ca(place.root / "strangers", name="demo", kind="federation")
    for authority, lifetime, words in (
        ("federation_ca", timedelta(milliseconds=1), "expired"),
        ("strangers", timedelta(days=1), "not issued by"),
    ):
        fresh = place.root / f"from_{authority}"
        enrol(place.root / authority, fresh, "silo/hospital_a", lifetime=lifetime)
        for path in fresh.glob("hospital_a.*"):
            shutil.copy(path, identities / path.name)
        done = place.start()
        assert done.exit_code == 4
        assert words in done.error and f"{identities}/hospital_a.crt" in done.error


def test_T26_T30_a_coordinator_with_an_expired_certificate_is_refused_before_anything_is_said(place: Place) -> None:
    folder = place.root / "late"
    enrol(
        place.root / "federation_ca", folder, "coordinator/main", ip_addresses=["127.0.0.1"],
        lifetime=timedelta(milliseconds=1),
    )  # fmt: skip
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "main.crt", folder / "main.key")
    with socket.create_server(("127.0.0.1", _port_of(place.root))) as listener, ThreadPoolExecutor(1) as pool:
        got = pool.submit(_serve, listener, context)
        done = command("silo", "join", "--config", place.config)
        listener.shutdown(socket.SHUT_RDWR)  # ends the accept that waits
    assert done.exit_code == 3
    assert "its certificate is outside its validity (expired or not yet valid): certificate has expired" in done.error
    assert got.result() == b""


def _serve(listener: socket.socket, context: ssl.SSLContext) -> bytes:
    """What silos said after the handshake, all in all."""
    said = b""
    while True:
        try:
            plain, _ = listener.accept()
        except OSError:
            return said
        with contextlib.suppress(OSError), plain, context.wrap_socket(plain, server_side=True) as connection:
            said += connection.recv(100)


# ---- the machine ----------------------------------------------------------------------------------------


def test_a_port_in_use_is_named(place: Place) -> None:
    port = _port_of(place.root)
    with socket.create_server(("127.0.0.1", port)):
        done = command("coordinator", "start", "--config", place.coordinator)
    assert done.exit_code == 6
    assert f"cannot listen on 127.0.0.1:{port}: Address already in use [CONFLICT]" in done.error
    assert f"port {port} is taken" in done.hint and f"sport = :{port}" in done.hint


def test_a_second_coordinator_on_one_state_folder_and_a_stop_of_none(place: Place) -> None:
    none = command("coordinator", "stop", "--config", place.coordinator)
    assert none.exit_code == 3 and "no coordinator is running" in none.error
    with daemon("coordinator", "start", "--config", place.coordinator) as coordinator:
        coordinator.ready()
        done = command("coordinator", "start", "--config", place.coordinator)
    assert done.exit_code == 6
    assert f"lock is held by process {coordinator.process.pid} [CONFLICT]" in done.error


@contextlib.contextmanager
def small_disk(folder: Path, size_bytes: int) -> Iterator[Callable[[], None] | None]:
    """A file system of that size at `folder`, if this user may mount one; yields what fills it to the last byte."""
    folder.mkdir(mode=0o700)
    options = f"size={size_bytes},mode=700"
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "fs", folder], capture_output=True, check=False)
    if mounted.returncode != 0:
        yield None
        return

    def fill() -> None:
        with contextlib.suppress(OSError), (folder / "filler").open("wb", buffering=0) as file:
            while file.write(bytes(1 << 16)):
                pass

    try:
        yield fill
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)


def sent(audit: Path) -> int:
    from fedsilo.edge.audit_segments import read_records

    return sum(record["event"] == "egress.sent" for record in read_records(audit))


def test_T39_a_full_disk_in_state_dir_halts_clearly_and_nothing_is_sent(place: Place) -> None:
    with small_disk(place.state, 72 << 20) as fill, contextlib.ExitStack() as stack:
        coordinator = stack.enter_context(daemon("coordinator", "start", "--config", place.coordinator))
        coordinator.ready()
        silo = stack.enter_context(daemon("silo", "start", "--config", place.config))
        silo.ready()
        silo.until("joined demo")
        if fill is not None:
            fill()
        else:  # without the right to mount: the kernel refuses the daemon's writes in another way
            limit_files(silo.process.pid)
        halted = silo.until("CRITICAL hospital_a halted: ")
        assert f"nothing is sent until space is free in {place.state}" in halted
        before = sent(place.state / "audit")
        status = command("silo", "status", "--config", place.config)
        assert re.search(r"^state +halted: .*(full|No space|too large|disk)", status.stdout, re.M)
        silo.process.terminate()
        done = silo.ended()
        assert "Traceback" not in done.stderr and done.stderr.count(" halted: ") == 1
        assert sent(place.state / "audit") == before
        if fill is not None:
            done = place.start()
            assert done.exit_code == 1
            assert re.search(
                r"state has \d+ bytes left; 67108864 are needed to keep a record \[DISK_FULL\]", done.error
            )


def limit_files(process_id: int) -> None:
    """No file of that process may grow any more (the kernel answers EFBIG, Python ignores the signal)."""
    import resource

    resource.prlimit(process_id, resource.RLIMIT_FSIZE, (1, 1))


# ---- the demo --------------------------------------------------------------------------------------------


def test_the_demo_refuses_a_folder_that_is_not_empty_an_unknown_method_and_a_data_folder_that_lacks_a_file(
    place: Place,
) -> None:
    done = command("fedsilo", "demo", "--no-console", "--out", place.root)
    assert (done.exit_code, done.error) == (6, f"error: {place.root} is not empty [CONFLICT]")
    done = command("fedsilo", "demo", "--no-console", "--method", "nope", "--out", place.root / "new")
    assert (done.exit_code, done.error) == (2, "error: there is no method 'nope' [INVALID_INPUT]")
    assert "pubswap-random" in done.hint
    held_out = place.root / "data" / "held_out.jsonl"
    held_out.unlink()
    out = place.root / "new"
    done = command("fedsilo", "demo", "--no-console", "--data", held_out.parent, "--out", out)
    assert done.exit_code == 8 and re.search(rf"demo.yaml:\d+: {held_out} is missing \[NOT_FOUND\]", done.error)
    done = command("fedsilo", "demo", "--no-console", "--json", "--data", place.root / "model", "--out", out)
    envelope = json.loads(done.stdout)
    assert (done.exit_code, envelope["ok"], envelope["error"]["code"]) == (8, False, "NOT_FOUND")
    assert "fedsilo data from-sets" in envelope["error"]["hint"]
