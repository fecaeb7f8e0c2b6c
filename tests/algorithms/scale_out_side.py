"""One of several processes of a trainer, for `test_scale_out`: `python -m tests.algorithms.scale_out_side JSON`.

Does its cases, one after the other, in a group that meets by a file, and writes what process RANK found at each:
figures as JSON, tensors beside them.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch

from fedsilo.protocol._generated import federation_pb2 as pb
from fedsilo.protocol.codec import decode
from fedsilo.protocol.errors import OperationError
from fedsilo.protocol.plan import Plan
from fedsilo.protocol.tasks import Evaluate, GeneratePublic, LoadAdapter, PrivateStep, PublicStep
from silo.trainer.adapters.lora import LoraAdapter
from silo.trainer.agreement import AgreementWatch, Limits
from silo.trainer.grpo import Answer, Group, Learner
from silo.trainer.resume import StateFile
from silo.trainer.rollout.embedded import EmbeddedEngine
from silo.trainer.rollout.engine import LedEngine, Question
from silo.trainer.scale_out import Place, Processes, ProcessLost
from silo.trainer.session import Session, shared_grader
from silo.trainer.sharding import ShardedBase
from tests.algorithms.test_T22_resume import SECRET, bare_session
from tests.algorithms.tiny import make_adapter, make_model, make_plan, make_shape, random_factors, start_payload

Found = tuple[dict[str, Any], dict[str, torch.Tensor]]


def answer(ids: tuple[int, ...], reward: float, donor: str = "") -> Answer:
    return Answer(ids, "", True, reward, donor)


# Five prompts for two processes, ragged, one without signal, one with a donor.
GROUPS = [
    Group((5, 9, 20, 7), (answer((4, 6, 1), 1.0), answer((3,), 0.0), answer((8, 8, 8, 8, 8), 0.0))),
    Group((11,), (answer((12, 1), 0.0), answer((13, 14, 1), 1.0, "b"))),
    Group((6, 7), (answer((4, 1), 1.0), answer((5, 1), 1.0))),
    Group((6, 8, 9), (answer((4, 7, 7, 7, 1), 1.0), answer((5, 1), 0.0), answer((2,), 1.0))),
    Group((3, 3, 3, 3, 3), (answer((9, 9, 9, 1), 0.0), answer((5, 6, 1), 1.0))),
]


def plan_with(changes: dict[str, Any]) -> Plan:
    fields: dict[str, Any] = {
        "objective__kl_coefficient": 0.05, "objective__proximal_mu": 0.1, "optimiser__epochs": 2,
        "optimiser__grad_norm_max": 0.5, "prompts_per_step": 5, "rollout__temperature": 0.8,
    }  # fmt: skip
    return make_plan(**{**fields, **changes})


PLAN = plan_with({})
STEPS = (1, 2, 3, 4, 5)
KEPT_AFTER = 3


def update(group: Processes | None, options: dict[str, Any]) -> Found:
    """The last epoch's gradients, before the clip, and the figures of one update."""
    model = make_model()
    adapter = LoraAdapter(model, make_shape(model))
    adapter.load(random_factors(adapter.shape, 0, 0.3))
    with torch.no_grad():
        for parameter in adapter.parameters:
            parameter.add_(0.01)  # so that the proximal term pulls
    sharded = bool(options.get("shard"))
    held = 0
    if sharded and group is not None:
        held = ShardedBase(adapter.decoder, model, group).share_bytes
    learner = Learner(
        adapter,
        plan_with(options.get("plan", {})),
        microbatch_tokens=options.get("microbatch_tokens", 10),
        checkpointing=sharded,
        group=group,
        equal_passes=sharded,
    )
    gradients: list[dict[str, torch.Tensor]] = []
    clip = torch.nn.utils.clip_grad_norm_

    def spy(parameters: Any, norm_max: float) -> torch.Tensor:
        named = zip(adapter.trained_names, parameters, strict=True)
        gradients.append({name: each.grad.clone() for name, each in named})
        return clip(parameters, norm_max)

    torch.nn.utils.clip_grad_norm_ = spy  # type: ignore[assignment]
    try:
        figures = learner.update(GROUPS[slice(*options.get("groups", [len(GROUPS)]))])
    finally:
        torch.nn.utils.clip_grad_norm_ = clip  # type: ignore[assignment]
    tensors = {f"{epoch}.{name}": each for epoch, found in enumerate(gradients) for name, each in found.items()}
    tensors |= {f"after.{name}": each for name, each in adapter.state().items()}
    return {
        "figures": {name: each for name, each in vars(figures).items() if each is not None},
        "share_bytes": held,
    }, tensors


def steps(group: Processes | None, options: dict[str, Any]) -> Found:
    """Private and public steps of a session, an evaluation, and where it stands; kept or gone on from, if asked."""
    session, shape = shared_session(group, shard=bool(options.get("shard")))
    payload, digest = start_payload(shape)
    tokens: list[Any] = []
    file = StateFile(Path(options["kept"]), SECRET) if "kept" in options else None
    first = 1
    if options.get("resume"):
        state = file.load() if file is not None else None
        assert state is not None
        tokens.append(session.restore(state))
        first = state.position.step + 1
    else:
        session.carry_out(LoadAdapter(1, digest), payload)
    for step in range(first, STEPS[-1] + 1):
        if step % 2:
            figures = session.carry_out(PrivateStep(1, step, tuple((step + place) % 9 for place in range(5)))).metrics
        else:
            body = session.carry_out(GeneratePublic(1, step, (4, 0, 9, 2), "all")).body
            told = decode(pb.PublicResponses, body)
            tokens.append([response.text for row in told.prompts for response in row.responses])
            donors = pb.PublicDonors()
            good = pb.Response(text="7a", finish=pb.FINISH_STOP)
            donors.prompts.add(prompt_index=4, donors=[pb.Donor(origin="b", position=0, response=good)])
            figures = session.carry_out(PublicStep(1, step, "replace", donors)).metrics
        tokens.append(figures["tokens"] if "tokens" in figures else figures["trained_tokens"])
        if file is not None and step == KEPT_AFTER and not options.get("resume") and (group is None or group.rank == 0):
            file.save(session.state())
    evaluated = decode(pb.MetricsEval, session.carry_out(Evaluate(0, "")).body)
    values = {f"{one.name} {one.topic}": one.value for one in evaluated.metrics}
    return {"tokens": tokens, "evaluated": values}, session.state().tensors


def shared_session(group: Processes | None, *, shard: bool = False) -> tuple[Session, Any]:
    if group is None:
        return bare_session(PLAN)
    alone, shape = bare_session(PLAN)
    session = Session(replace(alone._material, model=make_model()), group=group, shard_base=shard)
    session.begin_run(PLAN, shape)
    return session, shape


def failures(group: Processes | None, options: dict[str, Any]) -> Found:
    """One process fails at its own work: both hear of it, and can go on together."""
    assert group is not None
    told: dict[str, Any] = {}

    def failing() -> int:
        if group.rank == 1:
            raise OperationError("its own sentence", code="NOT_FINITE")
        return 7

    try:
        group.together(failing)
    except OperationError as error:
        told["failed"] = [error.code, error.message]
    told["after"] = group.together(lambda: 7 + group.rank)
    told["broadcast"] = group.broadcast(b"\0from 0" if group.rank == 0 else b"ignored").decode()
    told["empty"] = group.broadcast(b"").decode()
    told["gathered"] = group.gather({"rank": group.rank, "long": "x" * (group.rank * 1000)})[1]["rank"]
    asked: list[int] = []

    def grader(pairs: Any) -> list[bool]:
        asked.append(len(pairs))
        return [int(text) % 3 == 0 for text, _ in pairs]

    told["verdicts"] = shared_grader(grader, group)([(str(number), "") for number in range(7)])
    told["asked"] = asked
    led = LedEngine(_Counting, group)
    told["led"] = [one.ids for one in led.generate([], temperature=1.0, max_new_tokens=1)[0]]
    same = torch.ones(3)
    group.require_equal([same])
    try:
        group.require_equal([same + group.rank])
    except ProcessLost as error:
        told["apart"] = str(error)
    told["stopped"] = verdicts(group)
    told["swap"] = memory_short(group)
    return told, {}


def memory_short(group: Processes) -> list[Any]:
    """Memory of process 1 alone does not suffice: for the bound, then for the copies to go back to. Both are told each
    time and go on, and then do the step; and both go on after a task that is none. Last, each fails at what nobody
    agreed on, by an error of anybody's or by one of this trainer's own."""
    from silo.link import LinkMessage
    from silo.trainer.tasks import public_step
    from silo.trainer.worker import Worker

    session, shape = shared_session(group)
    payload, digest = start_payload(shape)
    session.carry_out(LoadAdapter(1, digest), payload)
    session.carry_out(GeneratePublic(1, 2, (4, 0, 9, 2), "all"))
    donors = pb.PublicDonors()
    good = pb.Response(text="7a", finish=pb.FINISH_STOP)
    donors.prompts.add(prompt_index=4, donors=[pb.Donor(origin="b", position=0, response=good)])
    worker = Worker(_Nobody(), None, None, lambda: group)
    worker._session = session
    fields = {"task": "PublicStep", "round": 1, "step": 2, "swap": "replace"}
    task = LinkMessage("task", fields, donors.SerializeToString(deterministic=True))
    assert session._run is not None
    module: Any = public_step
    learner, bound = session._run.learner, module.swap_bound
    snapshot = learner._snapshot

    def short(*_: Any) -> Any:
        raise torch.OutOfMemoryError("one card of several")

    found: list[Any] = []
    for at_bound in (True, False):
        if group.rank == 1:
            module.swap_bound = short if at_bound else bound
            learner._snapshot = snapshot if at_bound else short  # type: ignore[method-assign]
        found.append(worker._answer(task).fields["code"])
    learner._snapshot = snapshot  # type: ignore[method-assign]
    found.append(worker._answer(task).type)
    found.append(worker._answer(task).fields["code"])  # of no open step: refused by both
    for alone in (RuntimeError("nobody knows"), OperationError("its own disk", code="ROLLOUT_FAILED")):

        def broken(error: Exception = alone) -> None:
            raise error

        session._run.engine.rest = broken  # type: ignore[method-assign]
        try:
            worker._answer(LinkMessage("task", {"task": "PrivateStep", "round": 1, "step": 3, "rows": [0, 1]}))
        except ProcessLost as error:
            found.append(str(error))
    return found


class _Nobody:
    def send(self, message: Any) -> None: ...

    def receive(self) -> Any: ...

    def close(self) -> None: ...


def verdicts(group: Processes) -> list[str]:
    """Of four rollouts in a row: one is fine; with one process 1 alone has a reason to stop, with one process 0 alone;
    and one is fine again."""
    adapter = make_adapter()
    limits = Limits(share=1.0, marker_pushes=0)
    watch = AgreementWatch(adapter, 1.0, lambda *key: np.random.default_rng(len(key)), limits, group=group)
    questions = [Question((5, 9, 20), tuple(np.random.default_rng([7, place]) for place in range(4)))]
    found = []
    for number, faulty in enumerate((None, 1, 0, None)):
        engine = EmbeddedEngine(adapter.decoder, stop_ids=[], name=adapter.name)
        rollouts = engine.generate(questions, temperature=1.0, max_new_tokens=4)
        if faulty == 1 == group.rank:
            rollouts = [tuple(replace(each, adapter="other") for each in row) for row in rollouts]
        if faulty == 0 == group.rank:
            rollouts = [tuple(replace(each, logp=tuple(p - 1 for p in each.logp)) for each in row) for row in rollouts]
        try:
            watch.check((1, number), [(5, 9, 20)], rollouts, lambda asked, tokens: [])
            found.append("")
        except OperationError as error:
            found.append(error.code)
    return found


class _Counting:
    """An engine that tells how many there are of it: one, in process 0."""

    made = 0

    def __init__(self) -> None:
        _Counting.made += 1

    def use(self, source: Any) -> None: ...
    def rest(self) -> None: ...
    def close(self) -> None: ...

    def generate(self, questions: Any, *, temperature: float, max_new_tokens: int) -> list[Any]:
        from silo.trainer.rollout.engine import Rollout

        return [(Rollout((_Counting.made,), True),)]


CASES: dict[str, Callable[[Processes | None, dict[str, Any]], Found]] = {
    "update": update, "steps": steps, "failures": failures,
}  # fmt: skip


def main() -> None:
    order = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    group = Processes(Place(order["rank"], order["size"], order["rendezvous"]))
    for name, case, options in order["cases"]:
        figures, tensors = CASES[case](group, options)
        out = Path(order["folder"]) / f"{name} {group.rank}.safetensors"
        out.with_suffix(".json").write_text(json.dumps(figures))
        safetensors.torch.save_file({key: each.contiguous() for key, each in tensors.items()}, out)
    group.gather(None)
    os._exit(0)  # as a trainer ends; gloo's threads end badly where the interpreter takes them apart


if __name__ == "__main__":
    main()
