"""An adapter from the coordinator: whole, or from where the last try was cut.

Does not stop: a coordinator that cuts every try; each costs a message of the policy's budget for `control.fetch` (T11).
"""

from __future__ import annotations

from fedsilo.protocol._generated import federation_pb2 as pb
from fedsilo.protocol.errors import PeerError, UnreachableError, WireCode
from silo.guard.adapters import AdapterStore
from silo.guard.conversation import Conversation
from silo.guard.messages import Inbound


def fetch(talk: Conversation, adapters: AdapterStore, digest: str, *, bytes_max: int) -> Inbound:
    """Ask for an adapter and let the answer in.

    Args:
        talk: with the coordinator.
        adapters: keep what comes.
        digest: of the adapter.
        bytes_max: largest payload that it may be.

    Raises:
        UnreachableError: the line was cut, what came is kept; or what was kept is not the beginning of the adapter
            and is removed. Ask again.
        PeerError: the answer was refused; nothing is kept.
        OperationError: the disk does not keep it.
    """
    with adapters.arriving(digest, bytes_max) as arriving:
        resumed_at = arriving.size_bytes
        try:
            answer = talk.say("control.fetch", pb.Fetch(digest=digest, offset=resumed_at), into=arriving)
        except PeerError as error:
            arriving.drop()
            if resumed_at and error.wire_code is WireCode.DIGEST_MISMATCH:
                raise UnreachableError(
                    f"the {resumed_at} bytes kept of adapter {digest[:12]} are not its beginning; all of it is fetched"
                ) from error
            raise
        if answer.kind != "global.adapter":
            arriving.drop()
        return answer
