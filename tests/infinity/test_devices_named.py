"""Every tensor that the library makes says where: users have new ones go elsewhere (torch.set_default_device)."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity

ROOT = Path(infinity.__file__).parent
FACTORIES = (
    "tensor empty zeros ones arange full rand randn randint randperm empty_strided eye linspace logspace scalar_tensor"
)
AS_THE_CALLER_WANTS = ("commands/trace_command.py",)
"""The batch of a trace, which is of the meta device or not."""


def made_anywhere(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        is_torchs = isinstance(node.func.value, ast.Name) and node.func.value.id == "torch"
        says_where = {keyword.arg for keyword in node.keywords} & {"device", None}
        if is_torchs and node.func.attr in FACTORIES.split() and not says_where:
            yield f"{path.relative_to(ROOT)}:{node.lineno}: {ast.unparse(node)}"


def test_no_tensor_is_made_wherever_the_user_has_new_ones_go() -> None:
    files = [path for path in ROOT.rglob("*.py") if str(path.relative_to(ROOT)) not in AS_THE_CALLER_WANTS]
    assert len(files) > 200
    assert [line for path in files for line in made_anywhere(path)] == []


@pytest.mark.parametrize("stage", [1, 3])
def test_a_script_whose_new_tensors_go_elsewhere_trains_as_it_does_without(stage: int) -> None:
    def trained(device: str) -> tuple[list[float], list[torch.Tensor]]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 96), nn.Tanh(), nn.Linear(96, 64))
        data = [torch.randn(4, 64) for _ in range(3)]
        config: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_clipping": 0.1,
            "optimizer": {"type": "AdamW"},
            "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        }
        losses = []
        with torch.device(device):
            engine = infinity.initialize(model=model, config=config)[0]
            for rows in data:
                loss = engine(rows).square().mean()
                engine.backward(loss)
                engine.step()
                losses.append(loss.item())
            weights = list(engine.full_state_dict().values())
            engine.destroy()
        return losses, weights

    (losses, weights), (expected_losses, expected) = trained("meta"), trained("cpu")
    assert losses == expected_losses
    assert all(map(torch.equal, weights, expected))
