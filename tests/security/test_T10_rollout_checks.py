"""`silo check` and a vLLM server: what would end a run in its first minute is said before it begins."""

from __future__ import annotations

import sys
import tempfile
import venv
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fedsilo.protocol.errors import UsageError
from fedsilo.protocol.plan import Plan
from fedsilo.protocol.plan import Rollout as PlanRollout
from policies.model import Policy
from silo.config import SiloConfig, load_config
from silo.guard.checks import Look, check_site, rollout_limits, starts_vllm, vllm_there
from tests.policies.setting import PLAN, SIZE, policy_of, policy_text
from tests.security.link_harness import write_config
from tests.security.test_T10_rollout_servers import rollout

CONTEXT_TOKENS = 256


def configured(folder: Path, *lines: str) -> SiloConfig:
    return load_config(write_config(folder, rollout("engine: vllm", *lines)))


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """Short, whoever else runs tests beside it: the kernel takes 107 bytes of a socket's path."""
    with tempfile.TemporaryDirectory(prefix="check-") as folder:
        yield Path(folder)


def policy() -> Policy:
    return policy_of(policy_text())


def limits_of(config: SiloConfig, context_tokens: int, policy: Policy, plan: Plan | None) -> str:
    facts: Any = SimpleNamespace(context_tokens=context_tokens)
    look = Look(config, facts=facts)
    look.policy, look.plan = policy, plan
    return rollout_limits(look)


@pytest.fixture(scope="module")
def interpreter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment of its own with a package called vllm."""
    folder = tmp_path_factory.mktemp("venv")
    venv.create(folder, symlinks=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    (packages / "vllm").mkdir()
    (packages / "vllm" / "__init__.py").write_text('__version__ = "0.32.0"\n')
    return folder / "bin" / "python"


def test_vllm_is_imported_with_the_interpreter_that_the_servers_get(interpreter: Path, tmp_path: Path) -> None:
    config = configured(tmp_path, f"python: {interpreter}")
    (tmp_path / "state").mkdir()
    assert vllm_there(Look(config)) == f"vLLM 0.32.0 with {interpreter}"
    (package,) = interpreter.parents[1].glob("lib/python*/site-packages/vllm/__init__.py")
    package.write_text("import a_library_of_a_gpu\n")
    with pytest.raises(UsageError, match="ModuleNotFoundError: No module named 'a_library_of_a_gpu'") as told:
        vllm_there(Look(config))
    line = config.source.read_text().splitlines().index(f"  python: {interpreter}") + 1
    assert told.value.message.startswith(f"{config.source}:{line}: {interpreter} has no vLLM")
    assert "rollout.python" in told.value.hint and "docs/how-to/vllm.md" in told.value.hint


def test_silo_check_tries_vllm_only_where_the_guard_starts_it(tmp_path: Path) -> None:
    def rows(config: SiloConfig) -> dict[str, Any]:
        return {row["check"]: row for row in check_site(config, reach_coordinator=False)[0]}

    without = rows(configured(tmp_path, f"python: {sys.executable}"))
    assert without["vLLM"]["ok"] is False and without["vLLM"]["code"] == "NOT_INSTALLED"
    assert without["rollout limits"]["ok"] is None  # the example's policy and model are nowhere
    external = configured(tmp_path, "launch: external", "url: unix:/run/a/s", "public_url: unix:/run/b/s")
    assert "vLLM" not in rows(external) and "rollout limits" in rows(external)
    own = configured(tmp_path, "command: [-c, pass]")
    assert not starts_vllm(own) and "vLLM" not in rows(own)
    embedded = load_config(write_config(tmp_path, rollout("engine: embedded")))
    assert not {"vLLM", "rollout limits"} & rows(embedded).keys()


@pytest.mark.parametrize(
    ("lines", "message", "hint"),
    [
        (("max_lora_rank: 3", "max_model_tokens: 64"), "max_lora_rank: 3 is none that vLLM takes", "1, 8, 16, 32"),
        (("max_lora_rank: 1", "max_model_tokens: 64"), "max_lora_rank: 1 is below the adapter's rank, 2", "rank: 8"),
        (("max_lora_rank: 8", "max_model_tokens: 257"), "more than the model's context, 256", "256 or less"),
        (("max_lora_rank: 8", f"max_model_tokens: {SIZE.max_new_tokens}"), "less than 33 tokens", "33 or more"),
    ],
)
def test_limits_that_no_server_or_no_plan_fits_are_named(
    lines: tuple[str, ...], message: str, hint: str, tmp_path: Path
) -> None:
    config = configured(tmp_path, *lines)
    with pytest.raises(UsageError, match=message) as told:
        limits_of(config, CONTEXT_TOKENS, policy(), None)
    assert hint in told.value.hint
    assert told.value.message.startswith(f"{config.source}:")
    fits = configured(tmp_path, "max_lora_rank: 8", f"max_model_tokens: {SIZE.max_new_tokens + 1}")
    assert limits_of(fits, CONTEXT_TOKENS, policy(), None).startswith("rank 2 of 8, 33 of 33 tokens")


def test_limits_are_held_against_the_open_run(tmp_path: Path) -> None:
    config = configured(tmp_path, "max_lora_rank: 8", "max_model_tokens: 100")
    plan = PLAN.model_copy(update={"rollout": PlanRollout(max_prompt_tokens=68, max_new_tokens=32)})
    assert limits_of(config, CONTEXT_TOKENS, policy(), plan) == "rank 2 of 8, 100 of 100 tokens (run run-1)"
    longer = PLAN.model_copy(update={"rollout": PlanRollout(max_prompt_tokens=69, max_new_tokens=32)})
    with pytest.raises(UsageError, match="less than 101 tokens"):
        limits_of(config, CONTEXT_TOKENS, policy(), longer)
    external = configured(
        tmp_path, "launch: external", "url: unix:/run/a/s", "public_url: unix:/run/b/s", "max_model_tokens: 100",
        "max_lora_rank: 3",
    )  # fmt: skip
    assert limits_of(external, 32, policy(), plan)  # whoever starts that server says its rank and its context
    with pytest.raises(UsageError, match="less than 101 tokens"):
        limits_of(external, 32, policy(), longer)
