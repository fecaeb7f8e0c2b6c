"""A machine that will not: a port in use, a second daemon, a full disk, a demo without its folder."""

from __future__ import annotations

import contextlib
import json
import re
import socket
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.loopback.bad_input.place import Place, command, daemon

# ---- the machine ----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_port_in_use_is_named(place: Place) -> None:
    port = place.port
    with socket.create_server(("127.0.0.1", port)):
        done = command("coordinator", "start", "--config", place.coordinator)
    assert done.exit_code == 6
    assert f"cannot listen on 127.0.0.1:{port}: Address already in use [CONFLICT]" in done.error
    assert f"port {port} is taken" in done.hint and f"sport = :{port}" in done.hint


@pytest.mark.slow
def test_a_port_that_there_is_not_and_an_address_of_another_machine_are_named(place: Place) -> None:
    text, other = place.coordinator.read_text(), place.coordinator.with_name("elsewhere.yaml")
    listen = f"127.0.0.1:{place.port}"
    [line] = [number for number, row in enumerate(text.splitlines(), 1) if row.startswith("listen:")]
    for verb in ("check", "start"):
        other.write_text(text.replace(listen, "127.0.0.1:99999"))  # which is 34463 to who takes 16 bits of it
        done = command("coordinator", verb, "--config", other)
        assert done.exit_code == 2 and f"elsewhere.yaml:{line}: listen: " in done.error, done.error
        assert "a port is 0 to 65535" in done.error
    other.write_text(text.replace(listen, f"203.0.113.7:{place.port}"))  # RFC 5737: no machine has it
    done = command("coordinator", "start", "--config", other)
    assert done.exit_code == 6 and "Cannot assign requested address" in done.error
    assert "no interface here has it" in done.hint
    other.unlink()


@pytest.mark.slow
def test_a_database_that_is_none_is_named_as_damaged_and_stays_as_it_is(place: Place) -> None:
    state = place.coordinator.parent / "state"
    database, rubbish = state / "coordinator.db", b"this is no database, and was one " * 200
    state.mkdir(exist_ok=True)
    before = database.read_bytes() if database.exists() else None
    database.write_bytes(rubbish)
    try:
        done = command("coordinator", "start", "--config", place.coordinator)
        assert done.exit_code == 1 and "damaged: file is not a database [DATABASE_DAMAGED]" in done.error
        assert "docs/how-to/backup.md" in done.hint and database.read_bytes() == rubbish
    finally:
        database.unlink()
        if before is not None:
            database.write_bytes(before)


@pytest.mark.slow
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
    from fedsilo.audit.reader import read_records

    return sum(record["event"] == "egress.sent" for record in read_records(audit))


@pytest.mark.slow
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
            done = command("silo", "check", "--offline", "--config", place.config, "--json")
            rows = {row["check"]: row["ok"] for row in json.loads(done.stdout)["data"]["checks"]}
            assert rows["disk"] is False and rows["pinned files"] is True


def limit_files(process_id: int) -> None:
    """No file of that process may grow any more (the kernel answers EFBIG, Python ignores the signal)."""
    import resource

    resource.prlimit(process_id, resource.RLIMIT_FSIZE, (1, 1))


# ---- the demo --------------------------------------------------------------------------------------------


@pytest.mark.slow
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
    done = command("fedsilo", "demo", "--no-console", "--attack", "nonsense", "--out", out)
    assert (done.exit_code, done.error) == (2, "error: there is no attack 'nonsense' [INVALID_INPUT]")
    assert not out.exists()  # nothing is left behind by what was refused
    done = command("fedsilo", "demo", "--no-console", "--out", "/proc/fedsilo-demo")
    assert done.exit_code == 2 and "cannot make /proc/fedsilo-demo: " in done.error and "--out" in done.hint


def test_a_ledger_that_is_no_database_is_named_by_check_as_by_start(tmp_path: Path) -> None:
    from fedsilo.protocol.errors import OperationError
    from silo.guard.ledger import Ledger

    path, rubbish = tmp_path / "ledger.sqlite3", b"this is no database, and was one " * 200
    path.write_bytes(rubbish)
    for read_only in (True, False):
        with pytest.raises(OperationError, match=r"cannot open .*ledger.sqlite3: file is not a database") as caught:
            Ledger(path, read_only=read_only)
        assert "evidence" in caught.value.hint and path.read_bytes() == rubbish
    path.unlink()
    Ledger(path).close()
    Ledger(path, read_only=True).close()  # the counterpart
