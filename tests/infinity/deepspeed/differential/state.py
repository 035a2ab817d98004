"""Gradients, master weights and optimizer state, read and written: whole ones and this rank's."""

# mypy: ignore-errors
from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from deepspeed import comm, utils  # type: ignore[import-not-found]

from tests.infinity.deepspeed.differential.case import case, cases_over, raised
from tests.infinity.deepspeed.differential.nets import batches, config, stack, start, sums, train

ZERO = {"1": 1, "2": 2, "3": 3}
CPU = {"device": "cpu", "pin_memory": False}
PLACES = {"1": config(1), "2": config(2), "3": config(3), "2-offload": config(2, zero={"offload_optimizer": CPU})} | {
    "3-offload": config(3, zero={"offload_optimizer": CPU}),
    "3-offload-all": config(3, zero={"offload_optimizer": CPU, "offload_param": CPU}),
    "3-sub-groups": config(3, zero={"sub_group_size": 100}),
}


def _head(engine: Any) -> Any:
    return [(name, param) for name, param in _params(engine) if name.startswith("head")]


def _params(engine: Any) -> Any:
    return list(engine.module.named_parameters())


@cases_over(PLACES, relative=2e-6, absolute=2e-7)
def whole_values(_directory: Path, given: dict[str, Any]) -> Any:
    engine = start(stack(), given)
    train(engine, 1)
    x, y = batches(2)[1]
    engine.backward(engine(x, y))
    grads = {name: utils.safe_get_full_grad(param) for name, param in _head(engine)}
    engine.step()
    return (
        grads,
        {name: utils.safe_get_full_fp32_param(param) for name, param in _head(engine)},
        {name: utils.safe_get_full_optimizer_state(param, "exp_avg") for name, param in _head(engine)},
        {name: utils.safe_get_full_optimizer_state(param, "exp_avg_sq").sqrt() for name, param in _head(engine)},
    )


@cases_over({key: PLACES[key] for key in ("1", "2", "3")}, ranks=2, absolute=1e-7)
def whole_values_of_two(directory: Path, given: dict[str, Any]) -> Any:
    return whole_values(directory, given)


@cases_over(PLACES, absolute=1e-7)
def shapes_and_dtypes(_directory: Path, given: dict[str, Any]) -> Any:
    engine = start(stack(), given | {"bf16": {"enabled": True}})
    x, y = batches(1, dtype=torch.bfloat16)[0]
    engine.backward(engine(x, y))
    grads = [utils.safe_get_full_grad(param) for _, param in _params(engine)]
    engine.step()
    found = [utils.safe_get_full_fp32_param(param) for _, param in _params(engine)]
    states = [utils.safe_get_full_optimizer_state(param, "exp_avg") for _, param in _params(engine)]
    return [[list(each.shape) for each in part] for part in (grads, found, states)], [
        str(part[0].dtype) for part in (found, states)
    ]


@cases_over(PLACES, ranks=2)
def of_the_frozen(_directory: Path, given: dict[str, Any]) -> Any:
    """Also after a step, whether or not this rank has a part of the small ones that are trained."""
    model = stack()
    model.head.requires_grad_(False)
    engine = start(model, given)
    x, y = batches(1)[0]
    asked = [utils.safe_get_full_fp32_param, utils.safe_get_full_grad]
    if engine.zero_optimization_stage() == 3:
        asked += [utils.safe_get_local_fp32_param, utils.safe_get_local_grad]
    engine.backward(engine(x, y))
    found = [[name, [ask(param) is None for ask in asked]] for name, param in _params(engine)]
    engine.step()
    state = [utils.safe_get_full_optimizer_state(param, "exp_avg") is None for _, param in _params(engine)]
    shown = engine.optimizer.optimizer.state.values()
    return found, state, {float(each["step"]) for each in shown}, sorted({label for each in shown for label in each})


@cases_over(PLACES, absolute=1e-7)
def written_whole(_directory: Path, given: dict[str, Any]) -> Any:
    engine = start(stack(), given)
    train(engine, 1)
    out = {}
    for name, param in _params(engine):
        shape = utils.safe_get_full_fp32_param(param).shape
        utils.safe_set_full_fp32_param(param, torch.full(shape, 0.125))
        utils.safe_set_full_optimizer_state(param, torch.full(shape, 0.25), "exp_avg")
        utils.safe_set_full_optimizer_state(param, torch.full(shape, 0.5), "exp_avg_sq")
        out[name] = [
            utils.safe_get_full_fp32_param(param).sum(),
            utils.safe_get_full_optimizer_state(param, "exp_avg").sum(),
            utils.safe_get_full_optimizer_state(param, "exp_avg_sq").sum(),
        ]
    return out


@cases_over(PLACES, absolute=1e-7)
def gradients_written_whole(_directory: Path, given: dict[str, Any]) -> Any:
    engine = start(stack(), given)
    x, y = batches(1)[0]
    engine.backward(engine(x, y))
    for _, param in _params(engine):
        utils.safe_set_full_grad(param, torch.ones_like(utils.safe_get_full_grad(param)))
    read = [utils.safe_get_full_grad(param).sum() for _, param in _params(engine)]
    engine.step()
    return read, sums(engine)


@cases_over({key: value for key, value in PLACES.items() if key.startswith("3")}, ranks=2)
def own_values(_directory: Path, given: dict[str, Any]) -> Any:
    engine = start(stack(), given)
    x, y = batches(1)[0]
    engine.backward(engine(x, y))
    grads = {name: utils.safe_get_local_grad(param) for name, param in _head(engine)}
    engine.step()
    return (
        grads,
        {name: utils.safe_get_local_fp32_param(param) for name, param in _head(engine)},
        {name: utils.safe_get_local_optimizer_state(param, "exp_avg") for name, param in _head(engine)},
    )


@cases_over({key: value for key, value in PLACES.items() if key.startswith("3")}, ranks=2)
def parts_of_all_ranks_make_the_whole(_directory: Path, given: dict[str, Any]) -> Any:
    engine = start(stack(), given)
    x, y = batches(1)[0]
    engine.backward(engine(x, y))
    engine.step()
    found = []
    for param in engine.module.parameters():
        for part, whole in (
            (utils.safe_get_local_fp32_param(param), utils.safe_get_full_fp32_param(param)),
            (
                utils.safe_get_local_optimizer_state(param, "exp_avg"),
                utils.safe_get_full_optimizer_state(param, "exp_avg"),
            ),
        ):
            total = part.double().sum()
            comm.all_reduce(total)
            found.append(abs(total.item() - whole.double().sum().item()) < 1e-6)
    return found


@cases_over({key: value for key, value in PLACES.items() if key.startswith("3")}, ranks=2)
def own_values_written(_directory: Path, given: dict[str, Any]) -> Any:
    engine = start(stack(), given)
    x, y = batches(1)[0]
    engine.backward(engine(x, y))
    for _, param in _params(engine):
        utils.safe_set_local_grad(param, torch.full_like(utils.safe_get_local_grad(param), 0.5))
    grads = [utils.safe_get_local_grad(param).sum() for _, param in _params(engine)]
    engine.step()
    for _, param in _params(engine):
        value = utils.safe_get_local_fp32_param(param)
        utils.safe_set_local_fp32_param(param, torch.full_like(value, 0.25))
        utils.safe_set_local_optimizer_state(param, torch.full_like(value, 0.75), "exp_avg")
    read = [
        [utils.safe_get_local_fp32_param(param).sum() for _, param in _params(engine)],
        [utils.safe_get_local_optimizer_state(param, "exp_avg").sum() for _, param in _params(engine)],
    ]
    return grads, read, sums(engine)


@cases_over({"1": 1, "2": 2})
def own_values_are_stage_3s(_directory: Path, stage: int) -> Any:
    engine = start(stack(), config(stage))
    param = engine.module.head.weight
    return raised(lambda: utils.safe_get_local_fp32_param(param)), raised(lambda: utils.safe_get_local_grad(param))


@cases_over(ZERO)
def before_any_step(_directory: Path, stage: int) -> Any:
    engine = start(stack(), config(stage))
    param = engine.module.head.weight
    value = utils.safe_get_full_fp32_param(param)
    return value, value.requires_grad


@case()
def of_a_plain_parameter(_directory: Path) -> Any:
    param = stack().head.weight
    return [
        utils.safe_get_full_fp32_param(param), utils.safe_get_full_grad(param),
        utils.safe_get_full_optimizer_state(param, "exp_avg"),
    ]  # fmt: skip


@cases_over(ZERO)
def an_unknown_state(_directory: Path, stage: int) -> Any:
    engine = start(stack(), config(stage))
    train(engine, 1)
    return raised(lambda: utils.safe_get_full_optimizer_state(engine.module.head.weight, "no_such")) != "nothing"


@cases_over(ZERO)
def gradients_after_the_step(_directory: Path, stage: int) -> Any:
    engine = start(stack(), config(stage))
    x, y = batches(1)[0]
    engine.backward(engine(x, y))
    return utils.safe_get_full_grad(engine.module.head.weight) is not None


@cases_over(ZERO)
def gradients_while_they_accumulate(_directory: Path, stage: int) -> Any:
    engine = start(stack(), config(stage, gradient_accumulation_steps=2))
    out = []
    for x, y in batches(2):
        engine.backward(engine(x, y))
        if engine.is_gradient_accumulation_boundary():
            out.append(utils.safe_get_full_grad(engine.module.head.weight))
        engine.step()
    return out


@cases_over(ZERO)
def gradients_of_frozen(_directory: Path, stage: int) -> Any:
    model = stack()
    model.layers[0].weight.requires_grad_(False)
    engine = start(model, config(stage), model_parameters=[p for p in model.parameters() if p.requires_grad])
    x, y = batches(1)[0]
    engine.backward(engine(x, y))
    return [utils.safe_get_full_grad(param) is None for _, param in _params(engine)]


@case()
def vectorised_gradients(_directory: Path) -> Any:
    engine = start(stack(), config(3))
    x, y = batches(1)[0]
    engine.backward(engine(x, y))
    params = [param for _, param in _params(engine)]
    utils.safe_update_full_grad_vectorized(params, lambda grad, param: grad * 2)
    read = [utils.safe_get_full_grad(param).sum() for param in params]
    engine.step()
    return read, sums(engine)


@cases_over(ZERO)
def state_dict_of_the_optimizer(_directory: Path, stage: int) -> Any:
    engine = start(stack(), config(stage))
    train(engine, 1)
    state = engine.optimizer.state_dict()
    return isinstance(state, dict), len(state) > 0


@case()
def names(_directory: Path) -> Any:
    wanted = [
        "safe_get_full_fp32_param",
        "safe_get_full_grad",
        "safe_get_full_optimizer_state",
        "safe_get_local_fp32_param",
        "safe_get_local_grad",
        "safe_get_local_optimizer_state",
        "safe_set_full_fp32_param",
        "safe_set_full_grad",
        "safe_set_full_optimizer_state",
        "safe_set_local_fp32_param",
        "safe_set_local_grad",
        "safe_set_local_optimizer_state",
    ]
    return [callable(getattr(utils, name)) for name in wanted]


def _masters(engine: Any) -> Any:
    stage_3 = engine.zero_optimization_stage() == 3
    return getattr(engine.optimizer, "fp32_partitioned_groups_flat" if stage_3 else "single_partition_of_fp32_groups")


@cases_over({key: PLACES[key] for key in ("1", "2", "3")}, relative=2e-6, absolute=2e-7)
def masters_and_states_at_hand(_directory: Path, given: dict[str, Any]) -> Any:
    engine = start(stack(), given)
    train(engine, 3)
    masters, kept = _masters(engine), engine.optimizer.optimizer.state
    found = kept[masters[0]]
    total = dict.fromkeys(("exp_avg", "exp_avg_sq"), 0.0)
    for each in kept.values():
        for name in total:
            total[name] += each[name].double().abs().sum().item()
    facts = [
        len(masters),
        [(each.dim(), str(each.dtype)) for each in masters],
        len(kept) > 0,
        engine.optimizer.state is kept,
    ]
    steps = {float(each["step"]) for each in kept.values()}
    return (
        facts,
        steps,
        sorted(found),
        {name: found[name].dim() for name in total},
        total,
        [each.double().abs().sum().item() for each in masters],
    )


@case(ranks=2, relative=2e-6)
def masters_and_states_of_two(_directory: Path) -> Any:
    """Of both ranks together: each has what it steps."""
    found = []
    for stage in (1, 2, 3):
        engine = start(stack(), config(stage))
        train(engine, 2)
        masters, kept = _masters(engine), engine.optimizer.optimizer.state
        own = [each.double().abs().sum() for each in masters]
        own += [each["exp_avg"].double().abs().sum() for each in kept.values()]
        total = torch.stack([sum(own[: len(masters)]), sum(own[len(masters) :])])
        comm.all_reduce(total)
        found.append([total.tolist(), {float(each["step"]) for each in kept.values()}])
    return found
