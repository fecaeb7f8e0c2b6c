"""A rollout server of a test's own: HTTP over a unix socket and vLLM's rules about adapters, lies and all."""

from __future__ import annotations

import http.server
import json
import socketserver
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from silo.trainer.adapters.lora import LoraAdapter
from silo.trainer.rollout.engine import Question, RolloutPlace
from silo.trainer.rollout.vllm_server import VllmEngine
from tests.algorithms import tiny

STOP = 1
VOCABULARY = len(tiny.ALPHABET) + 3
Reply = tuple[int, Any]


class Scripted:
    """A server that answers token 5 and the end, K times.

    Attributes:
        asked: (path, body) of every request, in order.
        loaded: adapters by name.
        changes: called with the path, the body and the right reply; what it returns is said instead.
    """

    def __init__(self, socket: Path) -> None:
        self.socket = socket
        self.asked: list[tuple[str, Any]] = []
        self.loaded: dict[str, str] = {}
        self.changes: Callable[[str, Any, Reply], Reply] = lambda path, body, reply: reply
        self._lock = threading.Lock()
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.reply(None)

            def do_POST(self) -> None:
                self.reply(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

            def reply(self, body: Any) -> None:
                with outer._lock:
                    status, value = outer.changes(self.path, body, outer.right(self.path, body))
                if status == 0:  # it dies
                    self.close_connection = True
                    return
                data = json.dumps(value).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *words: Any) -> None: ...

            def address_string(self) -> str:
                return "unix"

        class Server(socketserver.ThreadingUnixStreamServer):
            daemon_threads = True
            request_queue_size = 64

            def handle_error(self, request: Any, client_address: Any) -> None:
                """A client that gave up is no news."""

        self._server = Server(str(socket), Handler)
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()

    def right(self, path: str, body: Any) -> Reply:
        self.asked.append((path, body))
        match path:
            case "/health":
                return 200, ""
            case "/v1/models":
                names = [{"id": name} for name in self.loaded]
                return 200, {"data": [{"id": "base", "max_model_len": 64}, *names]}
            case "/v1/load_lora_adapter":
                if not (Path(body["lora_path"]) / "adapter_model.safetensors").is_file():
                    return 404, {"error": {"message": "no adapter there"}}
                self.loaded[body["lora_name"]] = body["lora_path"]
                return 200, "loaded"
            case "/v1/unload_lora_adapter":
                return (200, "gone") if self.loaded.pop(body["lora_name"], None) else (404, "none")
            case "/reset_prefix_cache":
                return 200, {"success": True}
            case "/v1/completions":
                if body["model"] not in self.loaded:
                    return 404, {"error": {"message": f"no model {body['model']}"}}
                return 200, {"model": body["model"], "choices": [self.choice(body, at) for at in range(body["n"])]}
        return 404, "no such path"

    def choice(self, body: Any, at: int) -> dict[str, Any]:
        return {
            "index": at, "prompt_token_ids": body["prompt"], "token_ids": [5, STOP], "finish_reason": "stop",
            "logprobs": {"token_logprobs": [-1.0, -2.0]},
        }  # fmt: skip

    def bodies(self, path: str) -> list[Any]:
        return [body for asked, body in self.asked if asked == path]

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


def place_of(server: Scripted, public: Scripted | None = None, **changes: Any) -> RolloutPlace:
    folder = server.socket.parent / "adapters"
    folder.mkdir(exist_ok=True)
    fields = {"private": server.socket, "public": (public or server).socket, "adapters": folder, "sleep": False}
    return RolloutPlace(**{**fields, "timeout_seconds": 20.0, **changes})


def engine_of(server: Scripted, adapter: LoraAdapter, public: Scripted | None = None, **changes: Any) -> VllmEngine:
    engine = VllmEngine(adapter, place_of(server, public, **changes), stop_ids=[STOP], vocabulary=VOCABULARY)
    engine.use("private")
    return engine


def questions(count: int = 2, samples: int = 3) -> list[Question]:
    return [
        Question((3, 4 + place), tuple(np.random.default_rng((place, sample)) for sample in range(samples)))
        for place in range(count)
    ]


def generate(engine: Any, asked: list[Question] | None = None) -> Any:
    return engine.generate(asked or questions(), temperature=0.5, max_new_tokens=4)
