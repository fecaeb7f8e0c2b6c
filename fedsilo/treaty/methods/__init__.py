"""The methods, by name. Adding one is a module and a line here; it never widens a site's gate."""

from __future__ import annotations

from fedsilo.treaty.errors import UsageError
from fedsilo.treaty.method import Method
from fedsilo.treaty.methods import pubswap

METHODS: dict[str, Method] = {
    method.name: method for method in (pubswap.BALANCED, pubswap.RANDOM, pubswap.NO_SWAP, pubswap.FEDAVG_GRPO)
}


def method_named(name: str) -> Method:
    """Raises UsageError: no such method; the hint lists those there are."""
    try:
        return METHODS[name]
    except KeyError:
        raise UsageError(f"there is no method {name!r}", hint=f"one of: {', '.join(sorted(METHODS))}") from None
