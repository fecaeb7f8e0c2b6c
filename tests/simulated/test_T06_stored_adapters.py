"""T6: a stored adapter is found again only under a plan for which it was judged."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedsilo.protocol.codec import sha256_hex
from silo.guard.adapters import AdapterStore, frozen_under
from tests.policies.setting import PLAN

PAYLOAD = b"an adapter's bytes"


@pytest.mark.parametrize(("freeze", "found_again"), [("A", True), ("AB", True), ("alternate", False)])
def test_T06_another_run_of_the_same_seed_judges_what_has_moved(tmp_path: Path, freeze: str, found_again: bool) -> None:
    lora = PLAN.lora.model_copy(update={"freeze": freeze, "frozen_sha256": "ab" * 32})
    first = PLAN.model_copy(update={"lora": lora})
    second = first.model_copy(update={"run": "run-2"})
    store, digest = AdapterStore(tmp_path / "adapters"), sha256_hex(PAYLOAD)
    store.keep(digest, PAYLOAD, 1.0, frozen_under(first))
    assert store.find(digest, frozen_sha256=frozen_under(first)) == PAYLOAD
    assert (store.find(digest, frozen_sha256=frozen_under(second)) is not None) is found_again
    other = second.model_copy(update={"lora": lora.model_copy(update={"frozen_sha256": "cd" * 32})})
    assert store.find(digest, frozen_sha256=frozen_under(other)) is None
