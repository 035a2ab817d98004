"""The textbook's loop on several ranks, as DDP has it: gradients are averaged, in the order of ranks, and buffers are
rank 0's."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor, nn

from tests.support.averaging_engine import mean
from tests.walks.settings import Setting
from tests.walks.shadow import Shadow


class AveragingShadow(Shadow):
    """From stage 2 on each backward's gradients are averaged by themselves; below, those of micro-batches before the
    last are summed on their ranks and averaged with the last one's, as behind ``no_sync()``, or when somebody asks."""

    def _start(self, setting: Setting) -> None:
        super()._start(setting)
        self._sums: dict[nn.Parameter, Tensor] = {}
        self.is_due = True
        """Whether the next forward takes rank 0's buffers: DDP's do unless the last one ran without gradients."""
        self._follow_buffers()

    def _follow_buffers(self) -> None:
        for buffer in self.model.buffers():
            dist.broadcast(buffer, 0)

    def _before_forward(self, *, has_gradients: bool) -> None:
        if self.is_due:
            self._follow_buffers()
        self.is_due = has_gradients

    def call(self, batch: int, direct: bool) -> Tensor:
        if not direct:
            self._before_forward(has_gradients=True)
        return super().call(batch, direct)

    def evaluate(self, batch: int, mode: str) -> Tensor:
        self._before_forward(has_gradients=False)
        return super().evaluate(batch, mode)

    def _differentiate(self, loss: Tensor, retain: bool) -> None:
        before = {param: param.grad for param in self.model.parameters()}
        for param in before:
            param.grad = None
        super()._differentiate(loss, retain)
        own = {param: param.grad for param in before}
        for param, gradient in before.items():
            param.grad = gradient
        if self.setting.stage >= 2:
            for param in before:
                self._add(param, mean(own[param], param))
            return
        for param, gradient in own.items():
            if gradient is not None:
                gradient = gradient.float() if self.sums_in_fp32 else gradient
                self._sums[param] = self._sums[param] + gradient if param in self._sums else gradient
        if self.micro_steps + 1 >= self.accumulation:
            self._settle()

    def _settle(self) -> None:
        """What ranks have summed by themselves is averaged now."""
        sums, self._sums = self._sums, {}
        waits: list[bool] = [False] * dist.get_world_size()
        dist.all_gather_object(waits, bool(sums))
        for param in self.model.parameters() if any(waits) else ():
            self._add(param, mean(sums.get(param), param))

    def _add(self, param: nn.Parameter, gradient: Tensor | None) -> None:
        if gradient is None:
            return
        master = self.masters.get(param)
        if master is not None and self.sums_in_fp32:
            master.grad = gradient.float() if master.grad is None else master.grad + gradient
        else:
            param.grad = gradient if param.grad is None else param.grad + gradient

    def drop_gradient(self, name: str) -> None:
        super().drop_gradient(name)
        self._sums.pop(self.param(name), None)

    def drop(self) -> None:
        super().drop()
        self._sums = {}

    def _gradients(self) -> list[Tensor]:
        self._settle()
        return super()._gradients()

    def gradient(self, name: str) -> Tensor | None:
        self._settle()
        return super().gradient(name)

    def set_gradient(self, name: str, seed: int) -> None:
        self._settle()
        super().set_gradient(name, seed)

    # Files have the buffers of rank 0

    def save(self, tag: str, asynchronous: bool) -> None:
        super().save(tag, asynchronous)
        self._take_buffers_of_first(self.files[tag]["weights"])

    def export(self, tag: str) -> None:
        super().export(tag)
        self._take_buffers_of_first(self.files[tag])

    def _take_buffers_of_first(self, entries: dict[str, Tensor]) -> None:
        for name, _ in self.model.named_buffers():
            dist.broadcast(entries[name], 0)
