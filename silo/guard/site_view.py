"""The queries `certificates`, `settings` and `logs`: what this guard runs with, for whoever may open the socket.

Names, places and digests; of a key or a secret only where its file is. Of the guard's log whole lines of its own form
are shown, without what the trainer said in them: that process sees private prompts, and what it prints or reports may
quote one (threat T8). So the trainer's own log is not shown here at all; who may read the files of the daemon's user
reads it with `silo logs --trainer`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from certs.describe import describe_certificate
from certs.names import parse_spiffe_id
from fedsilo.treaty import strict_yaml
from fedsilo.treaty.errors import FedSiloError, NotAllowedError, NotFoundError
from silo.config import SiloConfig
from silo.guard.query_arguments import Asked
from silo.guard.startup import Site

LINES_DEFAULT, LINES_MAX = 200, 1_000
LOG_BYTES_MAX = 1 << 20  # of the end of a log that is looked at
LINE_CHARACTERS_MAX = 500
_OWN_LINE = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z [A-Z]+ ")
# The guard's own words, behind which the trainer's begin.
_QUOTED = re.compile(r"(the trainer(?:'s| reports| breaks)|private lines left out:).*")


class SiteView:
    """Args:
    site: what this guard was started with.
    now_seconds: UTC.
    """

    def __init__(self, site: Site, now_seconds: Callable[[], float]) -> None:
        self._site = site
        self._now_seconds = now_seconds

    def certificates(self, arguments: Mapping[str, Any]) -> list[dict[str, Any]]:
        """This site's certificates, as the files are now, and the authorities above them; never a key.

        Returns:
            [{"subject", "role", "names", "issuer", "fingerprint", "not_before", "not_after", "days_left", "pinned",
            "whose", "file", "in_use", "fault"}]. in_use: the running guard uses this one; a renewed file counts from
            the next start on. A file that cannot be read has a fault, and nothing else.

        Raises:
            UsageError: an argument; it takes none.
        """
        Asked(arguments)
        files = self._site.config.identity
        running = self._site.identity.peer.fingerprint
        named: list[tuple[str, Path | None, str]] = [
            ("this silo", files.certificate, running),
            ("the link to the trainer", files.link_certificate, ""),
            ("the federation CA", files.federation_ca, ""),
            ("the site CA", files.site_ca, ""),
        ]
        named += [
            (f"the operator {person}", path, "")
            for person in sorted(self._site.roles.people)
            if (path := files.certificate.parent / f"{person}.crt").is_file()
        ]
        return [self._row(whose, file, in_use) for whose, file, in_use in named if file is not None]

    def _row(self, whose: str, path: Path, running: str) -> dict[str, Any]:
        row: dict[str, Any] = {
            "subject": "", "role": "", "names": [], "issuer": "", "fingerprint": "", "not_before": "", "not_after": "",
            "days_left": 0, "pinned": False, "whose": whose, "file": str(path), "in_use": True, "fault": "",
        }  # fmt: skip
        try:
            found = describe_certificate(path.read_bytes())
        except (FedSiloError, OSError) as error:
            return row | {"fault": error.message if isinstance(error, FedSiloError) else error.strerror or "unreadable"}
        until = datetime.strptime(found["not_after"], "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=UTC)
        names = [name.partition(":")[2] for name in found["names"]]
        return row | {
            "subject": found["subject"],
            "role": "CA" if found["ca"] else _role_of(names),
            "names": names,
            "issuer": found["issuer"],
            "fingerprint": found["fingerprint"],
            "not_before": found["not_before"],
            "not_after": found["not_after"],
            "days_left": int((until.timestamp() - self._now_seconds()) // 86_400),
            # a root that this guard takes nobody else's word for
            "pinned": bool(found["ca"]),
            "in_use": not running or running == found["fingerprint"],
        }

    def settings(self, arguments: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Every key of the site's configuration as this guard runs with it: [{"key", "value", "origin"}].

        origin is FILE:LINE, or "default". A key file or a secret is named by its path; nothing reads it.

        Raises:
            UsageError: an argument; it takes none.
        """
        Asked(arguments)
        config = self._site.config
        try:
            lines = strict_yaml.load(config.source.read_bytes(), config.source.name).lines
        except (FedSiloError, OSError):  # removed or rewritten since it was read
            lines = {}
        return list(_settings(config, (), lines, config.source.name))

    def logs(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """{"lines", "left_out"}: the newest lines of the guard's log, and from how many of them words were left out.

        Args:
            arguments: {lines} (200, at most 1000), {source: "guard"}.

        Raises:
            UsageError: an argument that is not one of these.
            NotAllowedError: the trainer's log.
            NotFoundError: there is no log.
        """
        asked = Asked(arguments, "lines", "source")
        wanted = asked.number("lines", default=LINES_DEFAULT, least=1, most=LINES_MAX) or LINES_DEFAULT
        if asked.text("source", among=("guard", "trainer")) == "trainer":
            raise NotAllowedError(
                "the trainer's log may quote private text, so the control socket does not show it",
                hint="silo logs --trainer, as the user whose files they are",
            )
        path = self._site.config.state_dir / "logs" / "guard.log"
        try:
            with path.open("rb") as stream:
                size = stream.seek(0, 2)
                stream.seek(max(0, size - LOG_BYTES_MAX))
                text = stream.read(LOG_BYTES_MAX).decode("utf-8", "replace")
        except FileNotFoundError as error:
            raise NotFoundError("this guard has no log file yet") from error
        lines = text.split("\n")[1 if size > LOG_BYTES_MAX else 0 : -1]
        own = [line for line in lines if _OWN_LINE.match(line)]
        shown = [_QUOTED.sub(r"\1 (left out)", line)[:LINE_CHARACTERS_MAX] for line in own]
        left_out = len(lines) - len(own) + sum(_QUOTED.search(line) is not None for line in own)
        return {"lines": shown[-wanted:], "left_out": left_out}


def _role_of(names: list[str]) -> str:
    return next((found.role for name in names if (found := parse_spiffe_id(name)) is not None), "")


def _settings(
    block: BaseModel, path: tuple[str, ...], lines: Mapping[Any, int], source: str
) -> Iterator[dict[str, Any]]:
    for name in type(block).model_fields:
        if isinstance(block, SiloConfig) and name == "source":
            continue
        value, here = getattr(block, name), (*path, name)
        if isinstance(value, BaseModel):
            yield from _settings(value, here, lines, source)
            continue
        origin = f"{source}:{lines[here]}" if here in lines else "default"
        yield {"key": ".".join(here), "value": _plain(value), "origin": origin}


def _plain(value: object) -> Any:
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return value if value is None or isinstance(value, bool | int | float) else str(value)
