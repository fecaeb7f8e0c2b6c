"""X1, the two instruments by themselves: the search finds what is there in every form, the recorder writes down what
crossed and is read back without gRPC. The federations they stand around are in tests/loopback."""

from __future__ import annotations

import base64
import socket
import ssl
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest
from cryptography import x509
from hpack import Encoder
from hyperframe.frame import ContinuationFrame, DataFrame, Frame, HeadersFrame, PingFrame, SettingsFrame
from hypothesis import given
from hypothesis import strategies as st

from fedsilo.demo.data import silo_names, to_json_lines
from fedsilo.demo.provision import init_ca, provision_site
from fedsilo.demo.wire import (
    CONFIG,
    COUNT,
    FORMS,
    Canary,
    Search,
    control_text,
    make_canaries,
    normalised,
    rows_of,
    search_recordings,
)
from fedsilo.demo.wire_recorder import EndKeys, Unreadable, WireRecorder, read_recording
from fedsilo.files.task_files import read_tasks
from fedsilo.grading import grade
from fedsilo.protocol import codec
from fedsilo.protocol._generated import federation_pb2 as pb

SILOS = ("hospital_a", "hospital_b", "hospital_c", "hospital_d")
NOTE = Canary("Patient 7f3a9c: which dose of Zürn?", "hospital_a", "prompt")
TIMEOUT_SECONDS = 20.0


def forms_of(search: Search, data: bytes) -> set[str]:
    return {finding.form for finding in search.find(data)}


# ---- what is planted ---------------------------------------------------------------------------------


@pytest.mark.parametrize("tokenizer", ["digits", "bytes"])
@pytest.mark.parametrize("number", range(1, 17))  # as many as `fedsilo demo --silos` takes
def test_two_hundred_distinct_texts_in_every_place_of_every_silo(tokenizer: str, number: int) -> None:
    silos = silo_names(number)
    made = make_canaries(7, silos, tokenizer=tokenizer)
    assert len(made) == len({canary.text for canary in made}) == COUNT
    for silo in silos:
        places = [canary.place for canary in made if canary.silo == silo]
        assert set(places) == {"prompt", "id", "config", "environment", "exception"}
        assert places.count("config") == CONFIG and places.count("prompt") >= 3
    assert make_canaries(7, silos, tokenizer=tokenizer) == made != make_canaries(8, silos, tokenizer=tokenizer)
    assert control_text(7) not in {canary.text for canary in made}
    with pytest.raises(ValueError, match="too few"):
        make_canaries(7, silos, tokenizer=tokenizer, count=11 * number)


@pytest.mark.parametrize(("tokenizer", "verifier"), [("digits", "exact"), ("bytes", "math"), ("bytes", "choice")])
def test_planted_rows_are_questions_that_can_be_trained_on(tokenizer: str, verifier: str, tmp_path: Path) -> None:
    made = [canary for canary in make_canaries(7, SILOS, tokenizer=tokenizer) if canary.silo == "hospital_a"]
    rows = rows_of(made, topic="reverse", verifier=verifier)
    path = tmp_path / "rows.jsonl"
    path.write_bytes(to_json_lines(rows))
    read = read_tasks(path)
    assert not read.problems and len(read.rows) == len(rows)
    texts = {row.prompt for row in read.rows} | {row.id for row in read.rows}
    assert {canary.text for canary in made if canary.place in ("prompt", "id")} <= texts
    assert all(grade(verifier, row.answer, row.answer).correct for row in read.rows)


# ---- the search --------------------------------------------------------------------------------------

IN_FORM = {
    "raw": lambda text: text.encode(),
    "normalised": lambda text: " - ".join(text.upper()).encode(),
    "reversed": lambda text: text[::-1].encode(),
    "base64": lambda text: base64.b64encode(b"x" + text.encode() + b"yz"),
    "hex": lambda text: text.encode().hex().upper().encode(),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("canary", [NOTE, *make_canaries(3, SILOS, tokenizer="digits")[:60:7]])
def test_each_form_is_found_and_named(form: str, canary: Canary) -> None:
    search = Search([canary, Canary("another-one-0", "hospital_b", "id")])
    data = b"\x00\xff\x80" + IN_FORM[form](canary.text) + b"\x91\x00"
    assert form in forms_of(search, data)
    assert {finding.canary for finding in search.find(data)} == {canary}


@given(before=st.binary(max_size=40), after=st.binary(max_size=40), urlsafe=st.booleans())
def test_base64_is_found_at_every_alignment_and_over_line_ends(before: bytes, after: bytes, urlsafe: bool) -> None:
    data = before + NOTE.text.encode() + after
    encoded = base64.urlsafe_b64encode(data) if urlsafe else base64.encodebytes(data)
    assert "base64" in forms_of(Search([NOTE]), b"{" + encoded + b"}")


@given(st.binary(max_size=300))
def test_nothing_is_found_where_nothing_is(data: bytes) -> None:
    # the counterpart: bytes that hold no form of it, told by a slow look for the one form that all others start from
    if normalised(NOTE.text)[:8] not in normalised(data.decode("utf-8", "ignore")):
        assert not Search([NOTE]).find(data)


def test_tensor_values_are_searched_in_every_form_but_the_normalised_one() -> None:
    """Millions of numbers less all but letters and digits spell a short question by chance; text is never so long."""
    search = Search([NOTE])
    spread = b"\x00\x01".join(letter.encode() for letter in normalised(NOTE.text))
    assert forms_of(search, spread) == {"normalised"} and not search.find(spread, text=False)
    for form in ("raw", "reversed", "base64", "hex"):
        assert form in {finding.form for finding in search.find(IN_FORM[form](NOTE.text), text=False)}


@pytest.mark.parametrize("form", FORMS)
def test_a_canary_with_one_letter_changed_is_not_found(form: str) -> None:
    assert not Search([NOTE]).find(IN_FORM[form](NOTE.text.replace("dose", "dosE").replace("9c", "8c")))


# ---- reading back: frames written by other people's libraries -----------------------------------------


def grpc_message(body: bytes, *, compressed: bool = False) -> bytes:
    return struct.pack(">BI", compressed, len(body)) + body


def call(payload: bytes, *, chunk: int, text: str = "run") -> bytes:
    """One message of ours as the body of a call."""
    envelope = pb.Envelope(run=text, kind="public.responses")
    frames = [pb.Frame(opening=pb.Opening(envelope=envelope, payload_bytes=len(payload)))]
    frames += [pb.Frame(chunk=payload[start : start + chunk]) for start in range(0, len(payload), chunk)]
    return b"".join(grpc_message(frame.SerializeToString()) for frame in frames)


def recorded(path: Path, frames: list[Frame]) -> Path:
    path.write_bytes(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"".join(frame.serialize() for frame in frames))
    return path


def stream(number: int, body: bytes, *, size: int, padding: int = 0) -> list[Frame]:
    parts = [body[start : start + size] for start in range(0, len(body), size)]
    flags = ["PADDED"] if padding else []
    return [DataFrame(number, data=part, pad_length=padding, flags=flags) for part in parts]


def test_a_text_cut_by_every_layer_of_framing_is_found_whole(tmp_path: Path) -> None:
    payload = b"\x01" * 9 + NOTE.text.encode() + b"\x02" * 9
    one, two = stream(1, call(payload, chunk=7), size=5, padding=3), stream(3, call(b"plain", chunk=7), size=4)
    interleaved = [frame for pair in zip(one, two, strict=False) for frame in pair] + one[len(two) :]
    header = Encoder().encode([(":path", "/x"), ("note", NOTE.text)])
    block = [HeadersFrame(1, data=header[:9]), ContinuationFrame(1, data=header[9:], flags=["END_HEADERS"])]
    path = recorded(tmp_path / "0001-hospital_a.up", [SettingsFrame(0), *block, *interleaved, PingFrame(0)])
    read = read_recording(path)
    assert read.silo == "hospital_a" and read.upward and not read.cut and not read.rest
    assert sorted(message.payload for message in read.messages) == sorted([payload, b"plain"])
    assert NOTE.text.encode() in read.headers and NOTE.text.encode() not in read.raw
    verdict = search_recordings(tmp_path, [NOTE], ["run"])
    assert {finding.canary for finding in verdict.found} == {NOTE} and verdict.control_found
    assert verdict.messages == {("hospital_a", "public.responses"): (2, len(payload) + 5)}


def test_a_call_that_was_cut_is_still_searched(tmp_path: Path) -> None:
    for number, chunk in enumerate((300, 7), start=1):  # in one piece, and in pieces of which the last is cut too
        body = call(b"\x01" * 100 + NOTE.text.encode() + b"\x02" * 100, chunk=chunk)
        folder = tmp_path / str(number)
        folder.mkdir()
        path = recorded(folder / "0001-hospital_a.up", stream(1, body[:-50], size=1000))
        with path.open("ab") as more:
            more.write(DataFrame(1, data=b"never arrived whole").serialize()[:-4])
        read = read_recording(path)
        assert read.cut == 1 and not read.messages
        verdict = search_recordings(folder, [NOTE], ["x"])
        assert {finding.canary for finding in verdict.found} == {NOTE} and verdict.cut == 1


def test_a_text_that_the_cut_divides_between_two_chunks_is_found(tmp_path: Path) -> None:
    text = NOTE.text.encode()
    half = len(text) // 2
    body = call(text + b"\x02" * 500, chunk=half)
    end = body.index(text[half : 2 * half]) + half + 12
    recorded(tmp_path / "0001-hospital_a.up", stream(1, body[:end], size=50))
    assert {finding.canary for finding in search_recordings(tmp_path, [NOTE], ["x"]).found} == {NOTE}


@pytest.mark.parametrize(
    "frames",
    [
        [HeadersFrame(1, data=b"\xff" * 9, flags=["END_HEADERS"])],
        [DataFrame(1, data=struct.pack(">BI", 0, 3) + b"\xff\xff\xff")],
    ],
)
def test_bytes_of_no_known_layout_make_the_search_worthless_too(frames: list[Frame], tmp_path: Path) -> None:
    recorded(tmp_path / "0001-hospital_a.up", frames)
    verdict = search_recordings(tmp_path, [NOTE], ["x"])
    assert verdict.unreadable and not verdict.control_found


def test_a_compressed_message_makes_the_search_worthless_and_it_says_so(tmp_path: Path) -> None:
    body = grpc_message(b"\x1f\x8b whatever", compressed=True)
    path = recorded(tmp_path / "0001-hospital_a.up", stream(1, body, size=100))
    with pytest.raises(Unreadable, match="compressed"):
        read_recording(path)
    verdict = search_recordings(tmp_path, [NOTE], ["x"])
    assert verdict.unreadable and not verdict.control_found


def test_a_search_without_its_control_is_no_proof(tmp_path: Path) -> None:
    recorded(tmp_path / "0001-hospital_a.up", stream(1, call(b"plain", chunk=7, text="run-1-control"), size=100))
    assert search_recordings(tmp_path, [NOTE], ["control"]).control_found
    assert not search_recordings(tmp_path, [NOTE], ["control", "not there"]).control_found
    # what the coordinator says, or another silo, shows nothing of what this one says
    recorded(tmp_path / "0002-hospital_b.up", stream(1, call(b"plain", chunk=7, text="run-1"), size=100))
    down = recorded(tmp_path / "0002-hospital_b.down", stream(1, call(b"control", chunk=7), size=100))
    down.write_bytes(down.read_bytes().removeprefix(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"))
    assert not search_recordings(tmp_path, [NOTE], ["control"]).control_found
    recorded(tmp_path / "0003-hospital_b.up", stream(1, call(b"plain", chunk=7, text="run-control"), size=100))
    assert search_recordings(tmp_path, [NOTE], ["control"]).control_found
    with pytest.raises(ValueError, match="positive control"):
        search_recordings(tmp_path, [NOTE], [])


# ---- the recorder ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("keys")
    init_ca(root / "ca", name="demo", kind="federation")
    init_ca(root / "other", name="demo", kind="federation")
    provision_site(root / "main", site="main", federation_ca=root / "ca", people={}, is_coordinator=True)
    pinned = (root / "main" / "id" / "coordinator.pub").read_bytes()
    for folder, ca in (("hospital_a", "ca"), ("foreign", "other")):
        site = root / folder
        provision_site(site, site="hospital_a", federation_ca=root / ca, people={}, coordinator_public_key=pinned)
    return root


def end(root: Path, folder: str, name: str) -> EndKeys:
    return EndKeys(root / folder / "id" / f"{name}.crt", root / folder / "id" / f"{name}.key")


def context(root: Path, keys: EndKeys, *, server: bool) -> ssl.SSLContext:
    made = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
    made.minimum_version = ssl.TLSVersion.TLSv1_3
    made.verify_mode = ssl.CERT_REQUIRED
    made.load_verify_locations(root / "main" / "id" / "federation_ca.crt")
    made.load_cert_chain(keys.certificate, keys.key)
    return made


@pytest.fixture
def far_end(keys: Path) -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.settimeout(TIMEOUT_SECONDS)
        yield listening


@pytest.fixture
def recorder(keys: Path, far_end: socket.socket, tmp_path: Path) -> Iterator[WireRecorder]:
    made = WireRecorder(
        tmp_path / "wire",
        coordinator=end(keys, "main", "main"),
        silos={"spiffe://demo/silo/hospital_a": end(keys, "hospital_a", "hospital_a")},
        trust_root=keys / "main" / "id" / "federation_ca.crt",
        upstream=f"127.0.0.1:{far_end.getsockname()[1]}",
    )
    made.start()
    try:
        yield made
    finally:
        made.stop()


def connected(keys: Path, recorder: WireRecorder, folder: str) -> ssl.SSLSocket:
    host, _, port = recorder.address.rpartition(":")
    plain = socket.create_connection((host, int(port)), timeout=TIMEOUT_SECONDS)
    return context(keys, end(keys, folder, "hospital_a"), server=False).wrap_socket(plain, server_hostname=host)


def test_every_byte_goes_on_under_the_silos_own_certificate_and_is_written_down(
    keys: Path, recorder: WireRecorder, far_end: socket.socket, tmp_path: Path
) -> None:
    up, down = bytes(range(256)) * 1000, b"answer" * 5000
    with connected(keys, recorder, "hospital_a") as silo:
        silo.sendall(up[:1])
        plain, _ = far_end.accept()
        plain.settimeout(TIMEOUT_SECONDS)
        with context(keys, end(keys, "main", "main"), server=True).wrap_socket(plain, server_side=True) as coordinator:
            shown = x509.load_der_x509_certificate(coordinator.getpeercert(binary_form=True) or b"")
            own = x509.load_pem_x509_certificate((keys / "hospital_a" / "id" / "hospital_a.crt").read_bytes())
            assert shown == own
            silo.sendall(up[1:])
            assert read_exactly(coordinator, len(up)) == up
            coordinator.sendall(down)
            assert read_exactly(silo, len(down)) == down
    recorder.stop()
    assert (tmp_path / "wire" / "0001-hospital_a.up").read_bytes() == up
    assert (tmp_path / "wire" / "0001-hospital_a.down").read_bytes() == down


def test_a_certificate_of_another_ca_gets_no_further(
    keys: Path, recorder: WireRecorder, far_end: socket.socket, tmp_path: Path
) -> None:
    # under TLS 1.3 the refusal comes with the first byte that is read
    with pytest.raises(OSError), connected(keys, recorder, "foreign") as silo:  # alert or reset
        silo.sendall(b"x")
        if not silo.recv(1):
            raise ConnectionResetError
    recorder.stop()
    assert not list((tmp_path / "wire").iterdir())


def read_exactly(connection: ssl.SSLSocket, size: int) -> bytes:
    parts = bytearray()
    while len(parts) < size:
        part = connection.recv(1 << 16)
        if not part:
            break
        parts += part
    return bytes(parts)


def test_the_codec_and_the_reader_agree_on_frames(tmp_path: Path) -> None:
    payload = bytes(3 * codec.CHUNK_BYTES_MAX + 17)
    envelope = pb.Envelope(run="run", kind="lora.factors")
    body = b"".join(grpc_message(codec.frame_bytes(frame)) for frame in codec.frames(envelope, payload))
    read = read_recording(recorded(tmp_path / "0001-hospital_a.up", stream(1, body, size=16384)))
    assert [(message.envelope, message.payload) for message in read.messages] == [(envelope, payload)]
