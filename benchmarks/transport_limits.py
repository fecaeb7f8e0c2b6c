"""What the machine allows at most, for `benchmarks.transport`: a bare gRPC stream over mutual TLS between two
processes, with no protocol of ours on it, and SHA-256."""

from __future__ import annotations

import argparse
import hashlib
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc

from benchmarks.transport_process import cpu_seconds
from fedsilo.demo.processes import Children

CHUNK_BYTES = 1 << 20
STREAM_BYTES = 1 << 30
HASHED_BYTES = 1 << 28
METHOD = "/transport.Limit/Take"
REPOSITORY = Path(__file__).parent.parent


def limits() -> dict[str, float]:
    """Figures by name. Raises OperationError: the server did not start."""
    with tempfile.TemporaryDirectory(prefix="ft-") as folder:
        found = raw_stream(Path(folder))
    data = bytes(HASHED_BYTES)
    started = time.perf_counter()
    hashlib.sha256(data).digest()
    return {**found, "sha256_gb_per_second": round(HASHED_BYTES / 1e9 / (time.perf_counter() - started), 2)}


def raw_stream(out: Path) -> dict[str, float]:
    """1 GiB in messages of 1 MiB, one way."""
    from fedsilo.demo.provision import init_ca, provision_site

    init_ca(out / "ca", name="limit", kind="federation")
    here = provision_site(
        out / "here", site="main", federation_ca=out / "ca", people={"carol": ("operator",)}, is_coordinator=True
    )
    there = provision_site(
        out / "there", site="there", federation_ca=out / "ca", people={"alice": ("operator",)},
        coordinator_public_key=(here / "coordinator.pub").read_bytes(),
    )  # fmt: skip
    children = Children({"PYTHONPATH": str(REPOSITORY)})
    try:
        child = children.start(
            "limit", ["--serve", str(here / "main")], out / "server.log", module="benchmarks.transport_limits"
        )
        port = child.ready()["port"]
        credentials = grpc.ssl_channel_credentials(*_files(there / "there", "federation_ca.crt"))
        with grpc.secure_channel(f"127.0.0.1:{port}", credentials) as channel:
            call: Any = channel.stream_unary(METHOD)
            call(iter([b"warm"]))
            chunk, count = bytes(CHUNK_BYTES), STREAM_BYTES // CHUNK_BYTES
            cpu = cpu_seconds(child.process.pid), time.process_time()
            started = time.perf_counter()
            taken = int(call(chunk for _ in range(count)))
            seconds = time.perf_counter() - started
            cpu = cpu_seconds(child.process.pid) - cpu[0], time.process_time() - cpu[1]
        assert taken == STREAM_BYTES
    finally:
        children.stop()
    gigabytes = STREAM_BYTES / 1e9
    return {
        "raw_grpc_gb_per_second": round(gigabytes / seconds, 2),
        "raw_grpc_receiver_cpu_seconds_per_gb": round(cpu[0] / gigabytes, 3),
        "raw_grpc_sender_cpu_seconds_per_gb": round(cpu[1] / gigabytes, 3),
    }


def _files(identity: Path, ca: str) -> tuple[bytes, bytes, bytes]:
    """(CA, key, certificate) of `id/NAME.crt` and `id/NAME.key`."""
    folder = identity.parent
    return (
        (folder / ca).read_bytes(), identity.with_suffix(".key").read_bytes(), identity.with_suffix(".crt").read_bytes()
    )  # fmt: skip


def _serve(identity: Path) -> None:
    """Until this process is ended."""

    def take(requests: Iterator[bytes], _context: grpc.ServicerContext) -> bytes:
        return str(sum(len(chunk) for chunk in requests)).encode()

    root, key, certificate = _files(identity, "federation_ca.crt")
    server = grpc.server(ThreadPoolExecutor(2), options=(("grpc.max_receive_message_length", 2 * CHUNK_BYTES),))
    service, name = METHOD.strip("/").split("/")
    handler = grpc.method_handlers_generic_handler(service, {name: grpc.stream_unary_rpc_method_handler(take)})
    server.add_generic_rpc_handlers((handler,))
    port = server.add_secure_port(
        "127.0.0.1:0", grpc.ssl_server_credentials([(key, certificate)], root, require_client_auth=True)
    )
    server.start()
    print(f'{{"ok": true, "data": {{"port": {port}}}}}', flush=True)
    server.wait_for_termination()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--serve", type=Path, required=True, help="certificate and key without their endings")
    _serve(parser.parse_args(arguments).serve)
    return 0


if __name__ == "__main__":
    sys.exit(main())
