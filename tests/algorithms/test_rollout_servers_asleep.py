"""The rollout client and servers that sleep, and what a session that ends leaves with one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from silo.trainer.adapters.lora import LoraAdapter
from tests.algorithms import tiny
from tests.algorithms.scripted_server import Reply, Scripted, engine_of, generate, place_of, questions

pytestmark = pytest.mark.torch


# ---- sleep -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("offered", "asked"), [(True, True), (True, False), (False, True)])
def test_a_server_sleeps_where_it_can_and_gets_the_adapter_anew(
    server: Scripted, adapter: LoraAdapter, offered: bool, asked: bool
) -> None:
    targets = ("/is_sleeping", "/sleep?level=1", "/wake_up")
    server.changes = lambda path, body, reply: (200, {}) if offered and path in targets else reply
    engine = engine_of(server, adapter, sleep=asked)
    generate(engine)
    engine.rest()
    generate(engine)
    engine.rest()
    seen = [path for path, _ in server.asked if path in targets]
    if not asked:
        assert seen == []
    else:  # when they meet, and before each sleep
        once = ["/is_sleeping", "/sleep?level=1"]
        assert seen == (["/is_sleeping", *targets, *once] if offered else ["/is_sleeping"] * 2)
    assert len(server.bodies("/v1/load_lora_adapter")) == 1 + (offered and asked)


def test_a_server_that_a_trainer_left_asleep_is_woken_by_the_next(
    server: Scripted, adapter: LoraAdapter, tmp_path: Path
) -> None:
    asleep, served = [False], []

    def change(path: str, body: Any, reply: Reply) -> Reply:
        match path:
            case "/is_sleeping":
                return 200, {"is_sleeping": asleep[0]}
            case "/sleep?level=1" | "/wake_up":
                asleep[0] = path != "/wake_up"
                return 200, {}
            case "/v1/completions":
                served.append(asleep[0])
        return reply

    server.changes = change
    public = Scripted(tmp_path / "public.sock")
    try:
        engine = engine_of(server, adapter, public, sleep=True)
        generate(engine, questions(1))
        engine.rest()
        assert asleep == [True]
        following = engine_of(server, adapter, public, sleep=True)
        generate(following, questions(1))
        assert served == [False, False]
    finally:
        public.close()


# ---- the end -----------------------------------------------------------------------------------------


def test_a_session_that_ends_leaves_no_adapter_with_its_server(server: Scripted) -> None:
    """Else the weights that were trained on private rows would lie in a server of the site that goes on."""
    from fedsilo.protocol.tasks import LoadAdapter, PrivateStep
    from silo.link import LinkMessage
    from silo.trainer.agreement import Limits
    from silo.trainer.worker import Worker

    session, shape = tiny.make_session(
        rollout=place_of(server), private_grader=lambda pairs: [True] * len(pairs), agreement=Limits(share=0.0)
    )
    payload, digest = tiny.start_payload(shape)
    session.carry_out(LoadAdapter(1, digest), payload)
    session.carry_out(PrivateStep(1, 1))
    folder = server.socket.parent / "adapters" / "private"
    assert len(server.loaded) == len(list(folder.iterdir())) == 1

    class Stopping:
        def receive(self) -> LinkMessage:
            return LinkMessage("stop")

        def send(self, message: LinkMessage) -> None: ...

    worker = Worker(Stopping(), None)
    worker._session = session
    worker.run()
    assert not server.loaded and not list(folder.iterdir())
    session.close()  # and again, and where the server is gone
    server.close()
    session.close()
