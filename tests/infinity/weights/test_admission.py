"""Which models are taken and which are refused, without an engine: one test for each reason, and its neighbour that is
none."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

from infinity.errors import ConfigError
from infinity.weights import owners
from infinity.weights.admission import admit, refuse_owned, refuse_without_values
from infinity.weights.promises import promise
from tests.support.work import lines_run


class Net(nn.Sequential):
    """Two layers."""

    def weight_of(self, layer: int) -> nn.Parameter:
        return self.get_parameter(f"{layer}.weight")


def net() -> Net:
    return Net(nn.Linear(4, 3), nn.Linear(3, 2))


def with_weight(weight: torch.Tensor, *, requires_grad: bool = True) -> Net:
    model = net()
    model[1].weight = nn.Parameter(weight, requires_grad=requires_grad)
    return model


def test_a_plain_model_is_taken_and_left_alone() -> None:
    model = net()
    before = {name: (id(param), param.data_ptr(), param._version) for name, param in model.named_parameters()}
    admit(model, torch.float32)
    admit(model, torch.bfloat16)
    assert {name: (id(param), param.data_ptr(), param._version) for name, param in model.named_parameters()} == before


def test_without_parameters_there_is_nothing_to_shard() -> None:
    with pytest.raises(ConfigError, match="nothing to shard"):
        admit(nn.ReLU(), torch.float32)


class Restless(nn.Linear):
    """Its weight is another one at each look."""

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        self.weight = nn.Parameter(self.weight.detach())
        return super().named_parameters(*args, **kwargs)


def test_a_parameter_that_is_made_anew_at_each_look_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"model\.weight = 'made anew': .* target_modules"):
        admit(Restless(2, 2), torch.float32)


@pytest.mark.filterwarnings("ignore:.torch.jit")
def test_a_compiled_part_is_refused_by_its_name() -> None:
    model = nn.Sequential(net(), torch.jit.script(nn.Linear(2, 2)))
    with pytest.raises(ConfigError, match=r"model\.1 = '?ScriptModule"):
        admit(model, torch.float32)


def test_a_lazy_part_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"model\.0\.weight = '?lazy"):
        admit(nn.Sequential(nn.LazyLinear(2)), torch.float32)


@pytest.mark.parametrize("dtype", [torch.int16, torch.int64, torch.float4_e2m1fn_x2])
def test_only_floating_point_and_bytes_are_taken(dtype: torch.dtype) -> None:
    with pytest.raises(ConfigError, match=rf"model\.1\.weight = '?{dtype}.*register_buffer"):
        admit(with_weight(torch.empty(2, 3, dtype=dtype), requires_grad=False), torch.float32)
    for taken in (torch.int8, torch.uint8, torch.bool, torch.float8_e5m2, torch.float16):
        admit(with_weight(torch.empty(2, 3, dtype=taken), requires_grad=False), torch.float32)


def test_codes_that_a_class_of_their_own_reads_are_refused_with_what_they_are() -> None:
    class Params4bit(nn.Parameter):
        pass

    model = net()
    model[1].weight = Params4bit(torch.zeros(2, 3, dtype=torch.uint8), requires_grad=False)
    with pytest.raises(ConfigError, match=r"model\.1\.weight = 'Params4bit of torch.uint8.*load it in bf16"):
        admit(model, torch.float32)


def test_complex_numbers_are_refused_with_their_real_view_for_a_remedy() -> None:
    for requires_grad in (False, True):
        with pytest.raises(ConfigError, match=r"model\.1\.weight = 'torch.complex64'.*view_as_real.*view_as_complex"):
            admit(with_weight(torch.zeros(2, 3, dtype=torch.complex64), requires_grad=requires_grad), torch.float32)


def test_a_tensor_of_tensors_is_refused() -> None:
    """As ``fully_shard()`` makes parameters."""
    with pytest.raises(ConfigError, match=r"model\.1\.weight = 'TwoTensor'.*fully_shard"):
        admit(with_weight(TwoTensor(torch.zeros(2, 3), torch.zeros(2, 3))), torch.float32)  # type: ignore[no-untyped-call]


def test_only_dense_layouts_are_taken() -> None:
    with pytest.raises(ConfigError, match=r"model\.1\.weight.*to_dense"):
        admit(with_weight(torch.eye(3).to_sparse()), torch.float32)


def test_a_parameter_with_a_history_is_refused_if_it_trains() -> None:
    model = net()
    model[1]._parameters["weight"] = torch.ones(2, 3, requires_grad=True) * 2  # type: ignore[assignment]
    with pytest.raises(ConfigError, match=r"model\.1\.weight = '?not a leaf"):
        admit(model, torch.float32)
    model[1]._parameters["weight"] = (torch.ones(2, 3, requires_grad=True) * 2).detach()  # type: ignore[assignment]
    admit(model, torch.float32)


@pytest.mark.parametrize(
    "weight",
    [
        torch.ones(1).expand(2, 3),
        torch.ones(()).expand(6),
        torch.ones(3).expand(2, 3),
        torch.ones(2, 1).expand(2, 3),
        torch.arange(6.0).unfold(0, 3, 1),
        torch.arange(6.0).unfold(0, 3, 2),
        torch.as_strided(torch.arange(20.0), (3, 4), (3, 1)),
    ],
    ids=["one element", "a scalar", "rows", "columns", "windows", "windows by two", "rows that touch"],
)
def test_elements_that_share_a_place_are_refused(weight: torch.Tensor) -> None:
    with pytest.raises(ConfigError, match=r"model\.1\.weight = 'overlapping'.*clone"):
        admit(with_weight(weight), torch.float32)


@pytest.mark.parametrize(
    "weight",
    [
        torch.ones(3, 2).t(),
        torch.ones(4, 6)[1:3, ::2],
        torch.ones(1, 3).expand(1, 3),
        torch.ones(2, 3)[:, :1].expand(2, 1),
        torch.ones(0, 3),
        torch.ones(0, 1).expand(0, 3),
        torch.ones(1),
        torch.ones(()),
        torch.arange(6.0).unfold(0, 2, 2),
        torch.as_strided(torch.arange(20.0), (3, 4), (4, 1)),
        torch.as_strided(torch.arange(4.0), (1, 4), (2, 1)),
        torch.as_strided(torch.arange(4.0), (1, 4, 1), (0, 1, 1)),
    ],
    ids=[
        "transposed",
        "sliced",
        "expanded by one",
        "a column",
        "empty",
        "empty and expanded",
        "one",
        "a scalar",
        "windows side by side",
        "rows side by side",
        "one row with a stride of its own",
        "one row without a stride",
    ],
)
def test_every_other_way_to_lie_is_taken(weight: torch.Tensor) -> None:
    admit(with_weight(weight), torch.float32)


@pytest.mark.parametrize(
    ("dtypes", "config", "says"),
    [
        ((torch.float32, torch.float32), torch.float32, None),
        ((torch.float32, torch.float32), torch.bfloat16, None),
        ((torch.bfloat16, torch.bfloat16), torch.bfloat16, None),
        ((torch.bfloat16, torch.bfloat16), torch.float32, "0.weight = '?torch.bfloat16'?: the config makes weights"),
        ((torch.float32, torch.float64), torch.float32, "1.weight = '?torch.float64'?: the config makes weights"),
        ((torch.float32, torch.bfloat16), torch.bfloat16, "1.weight = '?torch.bfloat16'?: 0.weight is torch.float32"),
        ((torch.bfloat16, torch.float32), torch.bfloat16, "1.weight = '?torch.float32'?: 0.weight is torch.bfloat16"),
    ],
)
def test_weights_have_one_dtype(dtypes: tuple[torch.dtype, ...], config: torch.dtype, says: str | None) -> None:
    model = nn.Sequential(*(nn.Linear(2, 2).to(dtype) for dtype in dtypes))
    if says is None:
        admit(model, config)
    else:
        with pytest.raises(ConfigError, match=says):
            admit(model, config)


# Shared memory.

MEMORY = torch.zeros(24)


def two_of(first: torch.Tensor, second: torch.Tensor) -> nn.Module:
    model = nn.Module()
    model.first, model.second = nn.Parameter(first), nn.Parameter(second)
    return model


@pytest.mark.parametrize(
    ("first", "second", "shared"),
    [
        (MEMORY[:6], MEMORY[6:12], False),
        (MEMORY[6:12], MEMORY[:6], False),
        (MEMORY[:6], MEMORY[5:11], True),
        (MEMORY[5:11], MEMORY[:6], True),
        (MEMORY.view(4, 6), MEMORY[23:], True),
        (MEMORY.view(4, 6)[:2], MEMORY[12:], False),
        (MEMORY.view(4, 6)[:, 1], MEMORY[20:], False),
        (MEMORY.view(4, 6)[:, 1], MEMORY[19:], True),
        (MEMORY[:6], torch.zeros(24)[:6], False),
        (MEMORY[:6], MEMORY[:0], False),
    ],
)
def test_parameters_that_overlap_in_memory_are_refused(first: torch.Tensor, second: torch.Tensor, shared: bool) -> None:
    model = two_of(first, second)
    if shared:
        with pytest.raises(ConfigError, match=r"model\.second = '?shares memory with first"):
            admit(model, torch.float32)
    else:
        admit(model, torch.float32)


def test_overlap_is_counted_in_bytes() -> None:
    memory = torch.zeros(8)
    halves = two_of(memory[4:], memory.view(torch.bfloat16)[:8])
    with pytest.raises(ConfigError, match="dtypes"):
        admit(halves, torch.bfloat16)
    model = nn.Module()
    model.weight = nn.Parameter(memory[4:])
    model.register_buffer("narrow", memory.view(torch.bfloat16)[4:8])
    admit(model, torch.float32)
    model.register_buffer("narrow", memory.view(torch.bfloat16)[4:9])
    with pytest.raises(ConfigError, match=r"weight = '?shares memory with model"):
        admit(model, torch.float32)


def test_the_same_parameter_twice_is_tied_and_taken() -> None:
    model = net()
    model.add_module("again", nn.Linear(3, 2))
    model.get_submodule("again").weight = model.weight_of(1)
    admit(model, torch.float32)


def test_parameters_without_memory_share_none() -> None:
    with torch.device("meta"):
        model = net()
    admit(model, torch.float32)


def test_what_has_no_values_is_refused_by_name_unless_they_are_promised() -> None:
    model = net()
    refuse_without_values(model)
    model[1].weight = nn.Parameter(torch.empty(2, 3, device="meta"))
    with pytest.raises(ConfigError, match=r"model\.1\.weight = '?meta.*no values"):
        refuse_without_values(model)
    promise(model.weight_of(1), lambda _first, numel: torch.zeros(numel), "a file")
    refuse_without_values(model)
    model[0].register_buffer("scale", torch.ones(2, device="meta"))
    with pytest.raises(ConfigError, match=r"model\.0\.scale = '?meta.*no file has it"):
        refuse_without_values(model)


def keep_in_attribute(module: nn.Module, view: torch.Tensor) -> str:
    module.kept = view
    return "1.kept"


def keep_in_list(module: nn.Module, view: torch.Tensor) -> str:
    module.kept = [None, (torch.zeros(1), view)]  # type: ignore[assignment]
    return r"1.kept\[1\]\[1\]"


def keep_in_dict(module: nn.Module, view: torch.Tensor) -> str:
    module.kept = {"a": torch.zeros(1), "b": [view]}  # type: ignore[assignment]
    return r"1.kept.b\[0\]"


def keep_in_buffer(module: nn.Module, view: torch.Tensor) -> str:
    module.register_buffer("kept", view)
    return "1.kept"


@pytest.mark.parametrize("keep", [keep_in_attribute, keep_in_list, keep_in_dict, keep_in_buffer])
def test_tensors_that_would_not_follow_the_training_are_refused_by_name(
    keep: Callable[[nn.Module, torch.Tensor], str],
) -> None:
    model = net()
    where = keep(model[1], model.weight_of(1).detach()[0])
    with pytest.raises(ConfigError, match=rf"model\.1\.weight = '?shares memory with {where}"):
        admit(model, torch.float32)


def test_what_lies_elsewhere_or_nowhere_may_be_kept() -> None:
    model = net()
    memory = torch.zeros(20)
    model[1].weight = nn.Parameter(memory[:6].view(2, 3))
    for name, value in {
        "copy": model.weight_of(1).detach().clone(),
        "beside": memory[6:],
        "none": memory[:0],
        "far": torch.zeros(3, device="meta"),
        "sparse": torch.eye(3).to_sparse(),
        "parameter": [model.weight_of(1)],
        "deep": [[[model.weight_of(1).detach()]]],
        "words": {"a": "b"},
    }.items():
        object.__setattr__(model[1], name, value)
    admit(model, torch.float32)


def test_a_tensor_of_the_models_own_is_named_without_a_dot() -> None:
    model = net()
    model.kept = model.get_parameter("0.bias").detach()
    with pytest.raises(ConfigError, match="shares memory with kept"):
        admit(model, torch.float32)
    del model.kept
    model.register_buffer("kept", model.get_parameter("0.bias").detach())
    with pytest.raises(ConfigError, match="shares memory with model"):
        admit(model, torch.float32)


# Owners.


def test_what_somebody_owns_is_not_looked_at_and_refused_unless_it_is_staged() -> None:
    model = with_weight(torch.ones(3).expand(2, 3))
    owner = cast(owners.Owner, object())
    owners.adopt(model.weight_of(1), owner)
    try:
        admit(model, torch.float32)
        asked: list[Any] = []

        def is_staged(found: Any) -> bool:
            asked.append(found)
            return True

        refuse_owned(list(model.named_parameters()), is_staged)
        assert asked == [owner]
        with pytest.raises(ConfigError, match=r"model\.1\.weight = '?sharded"):
            refuse_owned(list(model.named_parameters()), lambda _owner: False)
    finally:
        owners.disown(model.weight_of(1))


def adapted(*, frozen: torch.dtype, trained: torch.dtype) -> Net:
    """As PEFT makes it: a frozen base, and adapters beside it."""
    model = net().to(frozen).requires_grad_(False)
    model.adapter = nn.Linear(4, 2).to(trained)
    return model


def test_adapters_in_fp32_over_a_frozen_base_in_the_configs_dtype_are_cast_as_it_says() -> None:
    admit(adapted(frozen=torch.bfloat16, trained=torch.float32), torch.bfloat16)


def test_a_layer_of_that_base_may_learn_beside_them() -> None:
    """As PEFT's ``modules_to_save``, which it sets for the head of every classifier."""
    model = adapted(frozen=torch.bfloat16, trained=torch.float32)
    model.head = nn.Linear(4, 2).bfloat16()
    admit(model, torch.bfloat16)
    model.requires_grad_(True)  # without a frozen base, somebody has kept layers in fp32 on purpose
    with pytest.raises(ConfigError, match="two dtypes are not kept apart"):
        admit(model, torch.bfloat16)


@pytest.mark.parametrize(("frozen", "trained"), [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float16)])
def test_other_mixtures_of_dtypes_are_refused(frozen: torch.dtype, trained: torch.dtype) -> None:
    with pytest.raises(ConfigError, match=r"two dtypes are not kept apart|the config makes weights"):
        admit(adapted(frozen=frozen, trained=trained), torch.bfloat16)


def test_what_is_narrower_stays_beside_weights_that_learn_and_alone_is_refused() -> None:
    for dtype in (torch.bfloat16, torch.float16, torch.float8_e4m3fn):
        model = adapted(frozen=dtype, trained=torch.float32)
        admit(model, torch.float32)
        model.requires_grad_(True)
        with pytest.raises(ConfigError, match=r"the config makes weights torch.float32: cast this one, too"):
            admit(model, torch.float32)  # and not the whole model, of which what is frozen may stay
        admit(model, torch.float32, trains=False)


def test_parameters_of_one_memory_are_looked_at_by_their_place() -> None:
    """In lines run: each was held against all others, as files of weights that are read whole have them."""

    def work(num_params: int) -> int:
        storage = torch.zeros(64 * num_params)
        model = nn.ParameterList([nn.Parameter(storage[64 * i : 64 * i + 64]) for i in range(num_params)][::-1])
        return lines_run(lambda: admit(model, torch.float32), "infinity/weights")

    few, many = work(100), work(800)
    assert many <= 9 * few, f"{few} lines for 100 parameters, {many} for 800"


@pytest.mark.parametrize("place", [0, 63, 64, 100, 128, 191])
def test_what_meets_one_of_several_in_its_memory_is_told_which(place: int) -> None:
    storage = torch.zeros(192)
    model = nn.ParameterList([nn.Parameter(storage[first : first + 64]) for first in (128, 0, 64)])
    model.register_buffer("tail", storage[place : place + 1])
    with pytest.raises(ConfigError, match=rf"model\.{[1, 2, 0][place // 64]}.*shares memory with model"):
        admit(model, torch.float32)
