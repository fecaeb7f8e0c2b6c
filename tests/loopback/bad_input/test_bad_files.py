"""Files that are wrong, line by line, against the real commands: what is refused, in which words, with which code."""

from __future__ import annotations

import json
import re
import shutil
import socket

import pytest

from fedsilo.demo.provision import enrol_operator, write_roles
from fedsilo.demo.sites import SILO_PEOPLE
from fedsilo.files.durable import lock_exclusively
from tests.loopback.bad_input.place import HASH, ROOT, Place, command, daemon, edit

# ---- policy ------------------------------------------------------------------------------------------


POLICY_MISTAKES = [
    ("^mode: enforce", "mode: enforce\ncolour: red", r":6: unknown key 'colour' \[", "known keys here: approvals"),
    ("^name: pubswap", "name: a\nname: pubswap", r":5: key 'name' stands twice \[", "first at line 4"),
    ("min_peers: 2", "min_peers: 1e-6", r":15: '1e-6' is a string in YAML, not a number \[", "write 1.0e-6"),
    ("^mode: enforce", "mode: no", r":5: 'no' is ambiguous in YAML \[", "write true or false, or quote it"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("old", "new", "error", "hint"), POLICY_MISTAKES)
def test_T35_a_policy_with_a_mistake_names_file_line_and_mend(
    place: Place, old: str, new: str, error: str, hint: str
) -> None:
    edit(place.policy, old, new)
    done = place.start()
    assert done.exit_code == 2
    assert re.match(f"error: {re.escape(str(place.policy))}{error}", done.error)
    assert done.hint.startswith(f"hint: {hint}")


@pytest.mark.slow
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


@pytest.mark.slow
def test_T35_a_configuration_with_an_unknown_key_names_its_line(place: Place) -> None:
    for path, program, line in ((place.config, "silo", 7), (place.coordinator, "coordinator", 5)):
        edit(path, "^federation: demo", "federation: demo\nlunch: soup")
        done = command(program, "start", "--config", path)
        assert done.exit_code == 2
        assert f"{path}:{line}: unknown key 'lunch' [INVALID_INPUT]" in done.error
        assert "federation" in done.hint
        assert " source" not in done.hint  # not a key of the file


@pytest.mark.slow
@pytest.mark.parametrize("named", [True, False])
def test_T15_a_policy_that_screens_for_canaries_starts_no_silo_without_them(place: Place, named: bool) -> None:
    edit(
        place.policy,
        "^    send_only_verified:",
        "    screens: [canary]\n    max_hits_per_day: 5\n    send_only_verified:",
    )
    edit(place.policy, "^approvals:", "text_screens:\n  canary: {max_edit_distance: 2, decode: []}\napprovals:")
    check = ("silo", "check", "--offline", "--config", place.config)
    assert re.search(r"ok +text screens", command(*check).stdout)
    if named:
        (place.config.parent / "canaries.txt").unlink()
    else:
        edit(place.config, "^  canaries: .*", "  canaries: null")
    line = next(n for n, text in enumerate(place.config.read_text().splitlines(), 1) if "canaries:" in text)
    asking = next(n for n, text in enumerate(place.policy.read_text().splitlines(), 1) if "screens: [canary]" in text)
    done = place.start()
    assert done.exit_code == (8 if named else 2)
    assert f"{place.config}:{line}" in done.error and "data.canaries" in done.error
    assert f"{place.policy}:{asking}: public.responses is screened for canaries" in done.error
    assert "silo init" in done.hint
    assert not (place.state / "audit").exists()
    done = command(*check)
    assert f"{place.config}:{line}" in done.stdout
    assert re.search(r"^error: 1 of \d+ checks failed: text screens \[", done.stderr, re.M)


@pytest.mark.slow
def test_a_socket_path_that_the_kernel_cannot_take_is_named(place: Place) -> None:
    for path, program in ((place.config, "silo"), (place.coordinator, "coordinator")):
        edit(path, "^state_dir: .*", f"state_dir: {'d' * 110}")
        done = command(program, "start", "--config", path)
        assert done.exit_code == 2
        assert re.search(r"\.yaml:\d+: .*\.sock is longer than 107 bytes \[INVALID_INPUT\]$", done.error)
        assert "shorter state_dir" in done.hint


@pytest.mark.slow
def test_a_configuration_that_is_not_there(place: Place) -> None:
    done = command("silo", "start", "--config", place.root / "none.yaml")
    assert (done.exit_code, "does not exist [NOT_FOUND]" in done.error) == (8, True)


# ---- files that do not fit ----------------------------------------------------------------------------


@pytest.mark.slow
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


@pytest.mark.slow
@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json"])
def test_a_model_folder_that_lacks_a_file_is_refused_naming_it(place: Place, name: str) -> None:
    (place.root / "model" / name).unlink()
    done = place.start()
    assert done.exit_code == 2
    assert f"{place.root / 'model'}: the model folder lacks {name} [" in done.error


@pytest.mark.slow
def test_a_model_folder_without_its_tokenizer_settings_is_another_model(place: Place) -> None:
    (place.root / "model" / "tokenizer_config.json").unlink()
    done = place.start()
    assert done.exit_code == 2
    assert re.search(rf"tokenizer_sha256 is {HASH}; .*policy.yaml:\d+ pins {HASH} \[MODEL_MISMATCH\]", done.error)


# ---- private data --------------------------------------------------------------------------------------


def spoil(place: Place, unreadable: int) -> int:
    """Four kinds of bad lines behind the good ones; answers become numbers, so that one can be unreadable.

    Returns how many good ones there are.
    """
    lines = place.private.read_text().splitlines()
    good = len(lines)
    first = json.loads(lines[0])
    lines += ['{"id": broken', json.dumps({"id": "q", "prompt": "x", "topic": "t"}), lines[0]]
    lines += [json.dumps({**first, "id": f"u{index}", "answer": "zz"}) for index in range(unreadable)]
    place.private.write_text("\n".join(lines) + "\n")
    edit(place.config, r"(?<=^  verifier: )exact", "numeric")  # of the private prompts; the others stand deeper
    return good


def listed(good: int) -> str:
    return (
        f"line {good + 1}: broken JSON; line {good + 2}: missing field 'answer'; line {good + 3}: duplicate id; "
        f"line {good + 4}: unparseable reference answer"
    )


@pytest.mark.slow
def test_a_few_bad_private_lines_are_counted_and_listed_and_people_are_told_no(place: Place) -> None:
    """One running silo: bad lines, a second daemon on its state, people who may not, and the socket it leaves."""
    good = spoil(place, 1)
    folder = place.root / "hospital_a"
    enrol_operator(folder / "site_ca", folder / "id", "dave")
    write_roles(folder / "id", "hospital_a", {**SILO_PEOPLE, "dave": ["viewer"]})
    with daemon("silo", "start", "--config", place.config) as silo:
        ready = silo.ready()
        assert ready.startswith("ready: hospital_a of demo")
        used = re.search(r"private (\d+) rows(?: to train on, (\d+) set aside)?, 4 lines left out", ready)
        assert used and sum(int(rows or 0) for rows in used.groups()) == good
        log = (place.state / "logs" / "guard.log").read_text()
        assert f"WARNING hospital_a private lines left out: {place.private}: {listed(good)}" in log
        done = command("silo", "status", "--config", place.config)
        counted = "1 broken JSON, 1 missing field 'answer', 1 duplicate id, 1 unparseable reference answer"
        assert f"{used[0].removeprefix('private ')} ({counted}): `silo check` lists them" in done.stdout

        second = place.start()
        assert second.exit_code == 6
        assert f"{place.state}/lock is held by process {silo.process.pid} [CONFLICT]" in second.error
        assert "two at once would fork the state" in second.hint
        assert "lock is held" not in (place.state / "logs" / "guard.log").read_text(), "the log is the running one's"

        may_not = command("silo", "stop", "--operator", "dave", "--config", place.config)
        assert may_not.exit_code == 4
        assert "dave (viewer) may not silo.stop at hospital_a [NOT_ALLOWED]" in may_not.error
        assert may_not.hint.endswith("at this site: alice, bob")
        refused = (
            "WARNING hospital_a refused the command 'stop': dave (viewer) may not silo.stop at hospital_a; it takes"
        )
        assert refused in (place.state / "logs" / "guard.log").read_text()
        nobody = command("silo", "stop", "--operator", "eve", "--config", place.config)
        assert nobody.exit_code == 8 and "eve.crt does not exist" in nobody.error
        assert command("silo", "stop", "--operator", "alice", "--config", place.config).exit_code == 0
        lock_exclusively(place.state / "lock").release()  # held until the daemon's very end
        verified = command("fedsilo", "audit", "verify", place.state)
        assert (verified.exit_code, verified.stderr) == (0, "")  # no record that is not signed yet
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
    assert f"warning: {place.private}: {listed(good)}" in done.stderr


@pytest.mark.slow
def test_too_many_bad_private_lines_end_the_start_and_the_check(place: Place) -> None:
    good = spoil(place, 40)
    done = place.start()
    assert done.exit_code == 2
    assert f"43 of {good + 43} lines are bad, the limit is under 5%: {listed(good)}; " in done.error
    assert "and 33 more [TASK_FILE_INVALID]" in done.error
    assert '{"id","prompt","answer","topic"}' in done.hint
    assert "zz" not in done.stderr  # reasons, never content
    assert "ended: the trainer refuses to configure" in (place.state / "logs" / "guard.log").read_text()
    done = command("silo", "check", "--offline", "--config", place.config)
    assert done.exit_code == 2 and "[TASK_FILE_INVALID]" in done.error
    assert f"43 of {good + 43} lines are bad" in done.stdout and "lines are bad" not in done.stderr
    failed = rf"1 of \d+ checks failed, 2 not tried: private data {re.escape(place.private.name)} \["
    assert re.search(failed, done.error)
