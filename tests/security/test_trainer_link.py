"""B1, B2, B3: who gets onto the link between guard and trainer, over a unix socket and over TLS under the site CA.

Every refusal is met by its counterpart: the right trainer gets in at the same listener afterwards.
"""

from __future__ import annotations

import logging
import os
import queue
import re
import ssl
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from certs.identity import site_member
from fedsilo.cli import certs as cli_certs
from fedsilo.demo import provision
from fedsilo.protocol.errors import FedSiloError, NotAllowedError, OperationError, UsageError
from silo.config import SiloConfig, load_config
from silo.guard.main import SupervisedTrainer
from silo.guard.trainer_process import probing, sandbox, trainer_link
from silo.guard.trainer_process.supervisor import Supervisor, TrainerGone, TrainerSaid
from silo.link import Link, LinkClosed, LinkMessage, LinkRefused, Listener, dial
from silo.link_tls import LinkFiles, LinkTls
from silo.trainer.worker import main
from tests.security.link_harness import (
    EXTERNAL,
    FEDERATION,
    LINK,
    NOW,
    REFUSED,
    TRAINER,
    Site,
    at,
    careless_trainer,
    free_port,
    taken_port,
    write_config,
)  # fmt: skip
from tests.security.people import SERVER, forge, new_keys


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Site:
    return Site(tmp_path_factory.mktemp("site"))


@pytest.fixture(scope="module")
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as threads:
        yield threads


def listening(site: Site, **options: Any) -> Listener:
    tls = LinkTls(site.guard_files, "guard", **options)
    return Listener("tls:127.0.0.1:0", user_ids=frozenset(), tls=tls)


def accept_right_trainer(listener: Listener, site: Site, pool: ThreadPoolExecutor) -> tuple[Link, Link]:
    dialled = pool.submit(
        dial, f"tls:127.0.0.1:{listener.port}", tls=LinkTls(site.trainer_files, "trainer"), timeout_seconds=10
    )
    return listener.accept(10), dialled.result(10)


# ---- TLS ---------------------------------------------------------------------------------------------


def test_B1_guard_and_trainer_of_one_site_talk_both_ways_at_once(site: Site, pool: ThreadPoolExecutor) -> None:
    listener = listening(site, peer_name="trainer")
    guard, trainer = accept_right_trainer(listener, site, pool)
    big = os.urandom(9_000_001)
    # Both ends write before either reads it all: a reader that holds up its own writer would never finish.
    hears = pool.submit(guard.receive), pool.submit(trainer.receive)
    says = (
        pool.submit(guard.send, LinkMessage("task", {"task": "LoadAdapter"}, big)),
        pool.submit(trainer.send, LinkMessage("done", {"task": "ExportDelta"}, big[::-1])),
    )
    for said in says:
        said.result(30)
    assert hears[0].result(30) == LinkMessage("done", {"task": "ExportDelta"}, big[::-1])
    assert hears[1].result(30) == LinkMessage("task", {"task": "LoadAdapter"}, big)
    guard.close()
    with pytest.raises(LinkClosed):
        trainer.receive()
    listener.close()


@pytest.mark.parametrize("case", REFUSED)
def test_B1_who_is_not_the_trainer_is_refused_at_both_ends(case: str, site: Site, pool: ThreadPoolExecutor) -> None:
    make, guard_says, trainer_sees = REFUSED[case]
    listener = listening(site, peer_name="trainer")
    dialled = pool.submit(careless_trainer, listener.port, make(site), site)
    with pytest.raises(LinkRefused, match=f"refused a trainer from 127.0.0.1: .*{guard_says}"):
        listener.accept(10)
    link = dialled.result(10)
    try:
        shown = str(link.receive().fields["message"])
    except LinkRefused as error:
        shown = error.message
    assert re.search(trainer_sees, shown), shown
    link.close()
    for end in accept_right_trainer(listener, site, pool):
        end.close()
    listener.close()


def test_B1_no_other_version_of_TLS(site: Site, pool: ThreadPoolExecutor) -> None:
    listener = listening(site)
    old = {"maximum_version": ssl.TLSVersion.TLSv1_2}
    dialled = pool.submit(careless_trainer, listener.port, site.trainer_files, site, **old)
    with pytest.raises(LinkRefused, match=r"no TLS 1\.3"):
        listener.accept(10)
    with pytest.raises(LinkRefused, match="version of TLS"):
        dialled.result(10)
    for end in accept_right_trainer(listener, site, pool):
        end.close()
    listener.close()


def test_B1_the_trainer_talks_to_no_other_guard(site: Site, tmp_path: Path, pool: ThreadPoolExecutor) -> None:
    other = Site(tmp_path)
    listener = listening(other)
    accepted = pool.submit(listener.accept, 10)
    with pytest.raises(LinkRefused, match="certificate of the guard: wrong CA"):
        dial(f"tls:127.0.0.1:{listener.port}", tls=LinkTls(site.trainer_files, "trainer"), timeout_seconds=10)
    with pytest.raises(LinkRefused, match="refuses this end's certificate"):
        accepted.result(10)
    for end in accept_right_trainer(listener, other, pool):
        end.close()
    listener.close()


def test_B1_a_trainer_that_listens_is_no_guard(site: Site, pool: ThreadPoolExecutor) -> None:
    """A genuine certificate of the site for a server, in the wrong role: only the name gives it away."""
    key = new_keys()[0]
    fake = site.stranger(
        forge(site.authority, uris=[TRAINER], usage=[SERVER], key=key, now=NOW, signing_key=False), key
    )
    tls = LinkTls(site.guard_files, "guard")
    tls._context.load_cert_chain(fake.certificate, fake.key)
    listener = Listener("tls:127.0.0.1:0", user_ids=frozenset(), tls=tls)
    accepted = pool.submit(listener.accept, 10)
    with pytest.raises(LinkRefused, match=r"wrong role: .*needed here: guard"):
        dial(f"tls:127.0.0.1:{listener.port}", tls=LinkTls(site.trainer_files, "trainer"), timeout_seconds=10)
    accepted.result(10).close()
    listener.close()


def test_B1_files_that_the_other_end_would_refuse_are_refused_before_dialling(site: Site) -> None:
    LinkTls(site.trainer_files, "trainer")
    with pytest.raises(NotAllowedError, match="wrong role"):
        LinkTls(site.guard_files, "trainer")
    with pytest.raises(NotAllowedError, match="expired at"):
        LinkTls(site.trainer_files, "trainer", clock=lambda: NOW + timedelta(days=8))
    with pytest.raises(NotAllowedError, match="does not match"):
        LinkTls(LinkFiles(site.trainer_files.certificate, site.guard_files.key, site.guard_files.site_ca), "trainer")
    loose = site.stranger(site.trainer_files.certificate.read_bytes(), new_keys()[0])
    loose.key.chmod(0o640)
    with pytest.raises(NotAllowedError, match="mode 0640"):
        LinkTls(loose, "trainer")


def test_B3_link_certificates_come_from_the_site_ca_and_open_nothing_else(site: Site) -> None:
    keys = new_keys(signing=False)[2]
    for role in ("guard", "trainer"):
        with pytest.raises(NotAllowedError, match=f"federation CA 'cardio-net' may not vouch for a {role}"):
            FEDERATION.issue(keys, role, "x", now=NOW)
        issued = site.authority.issue(keys, role, "x", now=NOW)
        with pytest.raises(NotAllowedError, match="wrong role"):  # so the trainer cannot approve
            site_member(issued.certificate_pem, site.authority.certificate_pem, NOW, role="operator")
    with pytest.raises(UsageError, match="no message-signing key"):
        site.authority.issue(new_keys()[2], "trainer", "x", now=NOW)


def test_B3_the_commands_issue_and_check_both_ends(site: Site, tmp_path: Path) -> None:
    def certs(*words: object) -> str:
        done = CliRunner().invoke(cli_certs.app, [str(word) for word in words])
        assert done.exit_code == 0, done.output
        return done.output

    for name, role in (("gate", "guard"), ("gpu1", "trainer")):
        token = certs("invite", f"{role}/{name}", "--ca", site.folder / "ca").splitlines()[0]
        certs("request", "--token", token, "--out", tmp_path)
        out = tmp_path / f"{name}.crt"
        certs("sign", tmp_path / f"{name}.request.json", "--ca", site.folder / "ca", "--out", out)
        words = ("--certificate", out, "--key", tmp_path / f"{name}.key", "--root", site.folder / "ca" / "ca.crt")
        assert f"ok: spiffe://hospital_a/{role}/{name}" in certs("check", *words, "--role", role)
        assert not (tmp_path / f"{name}.ed25519").exists()
        other = "guard" if role == "trainer" else "trainer"
        wrong = CliRunner().invoke(cli_certs.app, ["check", *map(str, words), "--role", other])
        assert (wrong.exit_code, "wrong role" in wrong.output) == (4, True)


# ---- unix socket -------------------------------------------------------------------------------------


def test_B1_a_process_of_another_user_is_refused_and_told(tmp_path: Path) -> None:
    address = f"unix:{tmp_path}/t.sock"
    listener = Listener(address, user_ids=frozenset({os.getuid() + 1}))
    assert (tmp_path / "t.sock").stat().st_mode & 0o777 == 0o666  # the kernel's word decides, not the mode
    refused = dial(address)
    with pytest.raises(LinkRefused, match=f"process {os.getpid()} as the trainer: it runs as user .*{os.getuid()}"):
        listener.accept(10)
    assert "is needed" in refused.receive().fields["message"]
    listener.close()
    listener = Listener(address, user_ids=frozenset({os.getuid()}))
    assert (tmp_path / "t.sock").stat().st_mode & 0o777 == 0o600
    trainer = dial(address)
    guard = listener.accept(10)
    guard.send(LinkMessage("stop"))
    assert trainer.receive().type == "stop"
    for end in (guard, trainer, listener):
        end.close()


# ---- configuration -----------------------------------------------------------------------------------


def reach(place: str) -> tuple[str, str]:
    return "  must_not_reach: []", f'  must_not_reach: ["{place}"]'


@pytest.mark.parametrize(
    ("changes", "key", "cause"),
    [
        ((at("tls:127.0.0.1:7000"), LINK), "trainer.address", "launch: external"),
        ((at("tls:127.0.0.1:7000"), EXTERNAL), "trainer.address", "identity.link_certificate"),
        ((EXTERNAL, ("  isolation: auto", "  isolation: namespaces")), "trainer.isolation", "builds no namespaces"),
        ((("  user: null", "  user: nobody"),), "trainer.user", "launch: external"),
        ((EXTERNAL, ("  name: null", "  name: gpu1")), "trainer.name", "tls: address"),
        ((EXTERNAL, LINK), "identity.link_certificate", "without effect"),
        ((reach("tcp:203.0.113.7:443"),), "trainer.must_not_reach", "launch: external"),
        ((EXTERNAL, reach("tcp:gateway.internal:443")), "trainer.must_not_reach", "is not tcp:ADDRESS:PORT"),
        ((EXTERNAL, reach("icmp:203.0.113.7:443")), "trainer.must_not_reach", "is not tcp:ADDRESS:PORT"),
        ((EXTERNAL, reach("udp:2001:db8::1:53")), "trainer.must_not_reach", r"with \[ADDRESS\] for IPv6"),
        (
            (at("tls:127.0.0.1:7000"), EXTERNAL, (LINK[0], LINK[1].replace("id/guard.key", "id/hospital_a.key"))),
            "identity.link_key",
            "never the federation's",
        ),
    ],
)
def test_B1_keys_that_contradict_each_other_are_named_with_their_line(
    changes: tuple[tuple[str, str], ...], key: str, cause: str, tmp_path: Path
) -> None:
    path = write_config(tmp_path, *changes)
    with pytest.raises(UsageError, match=cause) as caught:
        load_config(path)
    line = int(caught.value.message.removeprefix(f"{path}:").partition(":")[0])
    assert path.read_text().splitlines()[line - 1].strip().startswith(key.partition(".")[2])


def test_B1_the_example_and_its_commented_keys_load(tmp_path: Path) -> None:
    assert load_config(write_config(tmp_path)).identity.link_key is None
    config = load_config(write_config(tmp_path, EXTERNAL, LINK, at("tls:[::1]:7000"), ("  name: null", "  name: gpu1")))
    assert config.identity.link_certificate == tmp_path / "id" / "guard.crt"
    assert "--address tls:[::1]:7000 --certificate gpu1.crt" in trainer_link.start_command(config)


# ---- the guard's side as it runs ---------------------------------------------------------------------


@pytest.fixture
def home(site: Site) -> Iterator[Path]:
    """A short folder, since a unix socket's path is, with the site's identity in it."""
    with tempfile.TemporaryDirectory(prefix="link-") as folder:
        (Path(folder) / "id").symlink_to(site.folder / "id")
        (Path(folder) / "state").mkdir()
        federation = Path(folder, "federation")
        provision.init_ca(federation, name="cardio-net", kind="federation")
        if not (site.folder / "id" / "hospital_a.crt").exists():
            provision.enrol_silo(federation, site.folder / "id", "hospital_a")
        yield Path(folder)


def supervised(config: SiloConfig, **options: Any) -> tuple[Supervisor, queue.Queue[TrainerSaid | TrainerGone]]:
    events: queue.Queue[TrainerSaid | TrainerGone] = queue.Queue()
    return Supervisor(config, events.put, **options), events


def worker(*words: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "silo.trainer.worker", *map(str, words), "--wait-seconds", "30"]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})


def test_B1_silo_check_judges_the_link_before_anybody_dials(home: Path, site: Site) -> None:
    external = load_config(write_config(home, EXTERNAL))
    assert f"({os.getuid()}) may connect" in trainer_link.check(external)
    barred = load_config(write_config(home, EXTERNAL, ("  user: null", f'  user: "{os.getuid() + 4242}"')))
    with pytest.raises(UsageError, match=f"cannot pass through {home}"):
        trainer_link.check(barred)
    nobody = load_config(write_config(home, EXTERNAL, ("  user: null", "  user: no-such-user")))
    with pytest.raises(UsageError, match="no user 'no-such-user'"):
        trainer_link.check(nobody)

    with taken_port() as (port, release):
        tls = load_config(write_config(home, EXTERNAL, LINK, at(f"tls:127.0.0.1:{port}")))
        with pytest.raises(OperationError, match=f"tls:127.0.0.1:{port}: Address already in use"):
            trainer_link.check(tls)
        release()
        assert "as spiffe://hospital_a/guard/guard until" in trainer_link.check(tls)


def test_B1_the_guard_says_for_whom_it_waits_and_whom_it_refused(
    home: Path, site: Site, pool: ThreadPoolExecutor, caplog: pytest.LogCaptureFixture
) -> None:
    address = f"tls:127.0.0.1:{free_port()}"
    short = ("  start_timeout_seconds: 180", "  start_timeout_seconds: 1.0")
    config = load_config(write_config(home, EXTERNAL, LINK, at(address), short))
    asked: list[bool] = []

    def dial_once_it_listens() -> bool:
        if not asked:
            asked.append(True)
            pool.submit(careless_trainer, int(address.rpartition(":")[2]), None, site)
        return False

    supervisor, _ = supervised(config, should_stop=dial_once_it_listens)
    with caplog.at_level(logging.INFO, "fedsilo.silo"), pytest.raises(OperationError) as caught:
        supervisor.start(b"s", {})
    supervisor.stop()
    assert f"waiting up to 1 s for the trainer to dial {address}" in caplog.text
    assert "refused a trainer from 127.0.0.1: the trainer cannot be believed: it presented no cert" in caplog.text
    assert f"no trainer connected to {address} within 1 s; the last one that tried was refused" in caught.value.message
    assert f"--address {address} --certificate trainer.crt" in caught.value.hint


@pytest.mark.slow
def test_B1_a_real_trainer_is_told_why_it_is_not_taken(home: Path, site: Site, pool: ThreadPoolExecutor) -> None:
    address = f"unix:{home}/t.sock"
    listener = Listener(address, user_ids=frozenset({os.getuid() + 1}))
    process = worker("--address", address)
    with pytest.raises(LinkRefused):
        listener.accept(60)
    assert "the guard refuses this trainer: it runs as user" in process.communicate(timeout=60)[1]
    assert process.returncode == NotAllowedError.exit_code
    listener.close()

    listener = listening(site, peer_name="another")
    files = site.trainer_files
    tls = ("--certificate", files.certificate, "--key", files.key, "--site-ca", files.site_ca)
    process = worker("--address", f"tls:127.0.0.1:{listener.port}", *tls)
    with pytest.raises(LinkRefused):
        listener.accept(60)
    assert "is not the trainer named 'another'" in process.communicate(timeout=60)[1]
    assert process.returncode == NotAllowedError.exit_code
    listener.close()


def test_B1_a_trainer_with_an_expired_certificate_does_not_dial(
    site: Site, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_DATASETS_OFFLINE", "HF_HUB_DISABLE_TELEMETRY",
                 "DISABLE_TELEMETRY", "DO_NOT_TRACK", "TOKENIZERS_PARALLELISM"):  # fmt: skip
        monkeypatch.delenv(name, raising=False)
    files = REFUSED["expired"][0](site)
    assert files is not None
    words = ["--certificate", str(files.certificate), "--key", str(files.key), "--site-ca", str(files.site_ca)]
    assert main(["--address", "tls:127.0.0.1:1", *words]) == NotAllowedError.exit_code
    assert "expired at" in capsys.readouterr().err


class Enough(FedSiloError):
    """Ends a start once the isolation level is known, before data and model are loaded."""


def level_of(config: SiloConfig) -> str:
    supervisor, _ = supervised(config)
    levels: list[str] = []

    def accepted(level: str) -> None:
        levels.append(level)
        raise Enough("seen")

    try:
        with probing.probe_fields_beside_the_daemon(config, os.getpid()) as fields, pytest.raises(Enough):
            supervisor.start(b"s", fields, accepted=accepted)
    finally:
        supervisor.stop()
    return levels[0]


@pytest.mark.slow
def test_B1_an_external_trainer_gets_the_level_that_its_probes_show(home: Path, site: Site) -> None:
    config = load_config(write_config(home, EXTERNAL, at(f"unix:{home}/run/t.sock")))
    process = worker("--address", config.trainer.address)
    assert level_of(config) == "waived"  # a bare process of this machine reads the keys
    assert process.wait(30) == 0  # the guard went away after it had spoken: an end like any other

    if reason := probing.sandbox_trial("namespaces"):
        pytest.skip(f"this machine builds no sandbox: {reason}")
    (home / "run").mkdir(exist_ok=True)
    words = ["-m", "silo.trainer.worker", "--address", config.trainer.address, "--wait-seconds", "30"]
    sandboxed = sandbox.launch_in_sandbox(
        [sys.executable, *words], level="namespaces", socket_dir=home / "run", env={"OMP_NUM_THREADS": "1"}
    )
    assert level_of(config) == "container"  # a sandbox that somebody else built
    sandboxed.wait(30)


@pytest.mark.slow
def test_B1_a_trainer_below_the_policys_least_level_sees_no_data(home: Path, site: Site) -> None:
    config = load_config(write_config(home, EXTERNAL, at(f"unix:{home}/run/t.sock")))
    too_little = "isolation is waived; the policy accepts no less than container"
    for least, cause in (("container", too_little), ("waived", "refuses to configure: .*does not exist")):
        policy = SimpleNamespace(file=SimpleNamespace(trainer=SimpleNamespace(least_isolation=least)))
        parts: Any = SimpleNamespace(
            config=config, policy=policy, site_secret=b"s", schema=SimpleNamespace(payload_bytes=0)
        )
        process = worker("--address", config.trainer.address)
        trainer = SupervisedTrainer(parts, queue.Queue(), lambda: False)
        with pytest.raises(FedSiloError, match=cause):
            trainer.start()
        trainer.stop()
        assert process.wait(30) == 0


@pytest.mark.slow
@pytest.mark.torch
def test_B2_one_trainer_after_the_other_over_tls(home: Path, site: Site) -> None:
    """The real worker loads a model over TLS, ends when told, and the next one dials the same address."""
    from tests.algorithms.test_worker import write_tasks
    from tests.algorithms.tiny import make_model, make_tokenizer

    make_model().save_pretrained(home / "model")
    make_tokenizer().save_pretrained(home / "model")
    write_tasks(home / "tasks.jsonl", "p")
    config = load_config(
        write_config(
            home, EXTERNAL, LINK, at(f"tls:127.0.0.1:{free_port()}"),
            ("[data/train.jsonl]", "[tasks.jsonl]"), ("path: public/medqa_2k.jsonl", "path: tasks.jsonl"),
            ("path: public/held_out.jsonl", "path: tasks.jsonl"), ("path: /models/Qwen3-1.7B", "path: model"),
            ("  load: bf16", "  load: fp32"), ("  threads: auto", "  threads: 1"),
            ("installed package brings (docs/how-to/verifiers.md).\n  verifier: choice",
             "installed package brings (docs/how-to/verifiers.md).\n  verifier: exact"),
            ("    # How an answer to a public prompt is graded.\n    verifier: choice", "    verifier: exact"),
            ("    # Optional; without it, the public set's verifier.\n    verifier: choice", ""),
        )
    )  # fmt: skip
    files = site.trainer_files
    words = (
        "--address", config.trainer.address, "--certificate", files.certificate, "--key", files.key, "--site-ca",
        files.site_ca, "--scratch", home / "scratch",
    )  # fmt: skip
    process = worker(*words)
    supervisor, events = supervised(config)
    fields = probing.probe_fields(config, os.getpid())
    assert "guard_pid" not in fields  # a number of another machine means nothing
    assert str(home / "id" / "guard.key") in fields["key_paths"]
    state = supervisor.start(b"secret of a", fields)
    assert (state.isolation, state.ready["private_rows"] + state.ready["holdout_rows"]) == ("waived", 40)
    with pytest.raises(LinkClosed, match="cannot reach the guard"):  # it listens to nobody else meanwhile
        dial(config.trainer.address, tls=LinkTls(files, "trainer"))
    supervisor.stop()
    assert process.wait(30) == 0
    assert events.empty()

    process = worker(*words)
    supervisor, events = supervised(config)
    state = supervisor.start(b"secret of a", fields)
    process.kill()
    assert events.get(timeout=30) == TrainerGone(None)
    supervisor.stop()
    process.communicate(timeout=30)
