"""Is it memory that a failure is about? Needs no torch."""

from __future__ import annotations

CODE = "OUT_OF_MEMORY"
# torch raises a class of its own for an accelerator alone; for the machine's memory a plain RuntimeError.
_CPU_WORDS = ("defaultcpuallocator", "can't allocate memory")


def is_memory_failure(error: BaseException) -> bool:
    """By torch on an accelerator or a processor, by numpy, or by Python itself.

    What it does not see: a process that the kernel kills, which raises nothing.
    """
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    words = str(error).lower()
    return isinstance(error, RuntimeError) and any(each in words for each in _CPU_WORDS)
