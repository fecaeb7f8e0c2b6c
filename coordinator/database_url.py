"""Which database `database:` of coordinator.yaml names, and how its URL may be shown.

SQLite by a path, or PostgreSQL, always by psycopg 3. A connection to another host is TLS with the server's certificate
and name checked, unless the URL says otherwise; of a unix socket the library takes no notice of that.
What this does not stop: a password in coordinator.yaml, which whoever may read that file can read; a password file or
a client certificate, both named in the URL, is better.
"""

from __future__ import annotations

from sqlalchemy import URL, make_url
from sqlalchemy.exc import ArgumentError

from fedsilo.protocol.errors import UsageError

POSTGRESQL = "postgresql+psycopg"
EXAMPLES = "sqlite:////PATH or postgresql://USER@HOST/NAME"
_DRIVERS = {
    "sqlite": "sqlite", "sqlite+pysqlite": "sqlite", "postgres": POSTGRESQL, "postgresql": POSTGRESQL,
    POSTGRESQL: POSTGRESQL,
}  # fmt: skip
# What SQLAlchemy would hand to the driver's `connect`, as text, which it does not take.
_DRIVERS_OWN = frozenset({"autocommit", "conninfo", "context", "cursor_factory", "prepare_threshold", "row_factory"})
_SECRETS = ("password", "secret", "scram_")
_THIS_MACHINE = frozenset({"localhost", "127.0.0.1", "::1"})
# Of PostgreSQL, where the URL does not say them. The last four find a server that is gone without a word.
_DEFAULTS = {
    "connect_timeout": "10", "keepalives_idle": "30", "keepalives_interval": "10", "keepalives_count": "3",
    "tcp_user_timeout": "60000",
}  # fmt: skip


def database_url(text: str) -> URL:
    """The URL with what is always meant.

    Raises:
        UsageError: not a URL of SQLite or PostgreSQL, or with a parameter of the driver's own; the message holds no
            value of it.
    """
    url = _parsed(text)
    if url is None or url.drivername not in _DRIVERS:
        raise UsageError("the database's URL names neither SQLite nor PostgreSQL", hint=f"write {EXAMPLES}")
    url = url.set(drivername=_DRIVERS[url.drivername])
    if url.drivername != POSTGRESQL:
        return url
    if not url.database and "dbname" not in url.query and "service" not in url.query:
        raise UsageError("the database's URL names no database", hint=f"write {EXAMPLES}")
    if own := sorted(_DRIVERS_OWN & set(url.query)):
        raise UsageError(
            f"the database's URL names {own[0]}, which is no connection parameter of PostgreSQL",
            hint="leave it out: the coordinator sets what it needs",
        )
    # what is named twice is a list, which libpq wants as one text; several hosts are joined with their ports later
    joined = {name: (" " if name == "options" else ",").join(_all(url, name)) for name in url.query if name != "host"}
    url = url.update_query_dict(joined)
    defaults = dict(_DEFAULTS)
    if not _hosts(url) or not _hosts(url) <= _THIS_MACHINE:
        defaults["sslmode"] = "verify-full"
    return url.update_query_dict({name: value for name, value in defaults.items() if name not in url.query})


def is_secret(parameter: str) -> bool:
    """Return True if a connection parameter of libpq holds a password or a key."""
    return any(word in parameter.lower() for word in _SECRETS)


def shown_url(text: str) -> str:
    """The URL for people and logs: without a password, and with nothing but stars where it cannot be read."""
    url = _parsed(text) if text else None
    if url is None:
        return "***" if text else ""
    query = {name: "hidden" if is_secret(name) else value for name, value in url.query.items()}
    return url.set(query=query).render_as_string(hide_password=True)


def _parsed(text: str) -> URL | None:
    try:
        url = make_url(text)
    except (ArgumentError, ValueError):
        return None
    # an @ in a password is written %40; else its rest would pass for a host
    return None if "@" in (url.host or "") else url


def _hosts(url: URL) -> set[str]:
    told = [url.host or "", *_all(url, "host"), *_all(url, "hostaddr")]
    return {host.rpartition(":")[0] or host if host.count(":") == 1 else host
            for each in told for host in each.split(",") if host}  # fmt: skip


def _all(url: URL, name: str) -> tuple[str, ...]:
    value = url.query.get(name, ())
    return (value,) if isinstance(value, str) else value
