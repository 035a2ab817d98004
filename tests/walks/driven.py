"""An engine, driven by the same calls as ``Shadow``: each is what a user's script would write."""

from __future__ import annotations

import copy
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import infinity
import infinity.deepspeed
from tests.support.budgets import ROOM_BYTES, smallest_budget_bytes
from tests.support.optimizers import CHOICES
from tests.support.world import Setting as Thresholds
from tests.walks.model import Walker, groups_of, loss_of, tokens_of, values_like
from tests.walks.settings import SCALE_POWER, SCALE_WINDOW, Recipe, Setting
from tests.walks.shadow import SCHEDULES, seeded


class Driven:
    """``directory``: for checkpoints and swap files."""

    def __init__(self, recipe: Recipe, setting: Setting, seed: int, directory: Path) -> None:
        self.recipe, self.directory = recipe, directory
        self.engine: Any = None
        self.fresh(setting, seed)

    def fresh(self, setting: Setting, seed: int) -> None:
        if self.engine is not None:
            self.engine.destroy()
        self.setting = setting
        self.losses: list[Tensor] = []
        self.engine = self._built(seed)

    def _built(self, seed: int) -> Any:
        def initialized(budget: int) -> Any:
            return self._initialized(self._model(seed, budget), budget)

        starves = self.setting.budget_times and "nvme" in (self.setting.params, self.setting.states)
        least = smallest_budget_bytes(initialized) if starves else None
        return initialized(ROOM_BYTES if least is None else int(least * self.setting.budget_times))

    def _model(self, seed: int, budget: int) -> Walker:
        del budget
        if not self.setting.under_init:
            return seeded(self.recipe, seed)
        with infinity.Init(config_dict_or_path=self._config(ROOM_BYTES)):
            return seeded(self.recipe, seed)

    def again(self) -> None:
        if self.setting.deepspeed and self.recipe.width % 8:
            self.engine.destroy()
        self.losses.clear()
        self.engine = self._initialized(self.engine.module, ROOM_BYTES)

    def _initialized(self, model: Walker, budget: int) -> Any:
        choice, config = CHOICES[self.recipe.optimizer], self._config(budget)
        groups = groups_of(model)
        given: dict[str, Any] = {"model_parameters": groups}
        if choice.client is not None:
            given = {"optimizer": choice.client(groups)}
        if self.recipe.schedule:
            given["lr_scheduler"] = SCHEDULES[self.recipe.schedule]
        if choice.client is not None and self.recipe.schedule:
            given["lr_scheduler"] = SCHEDULES[self.recipe.schedule](given["optimizer"])
        initialize: Any = infinity.deepspeed.initialize if self.setting.deepspeed else infinity.initialize
        return initialize(model=model, config=config, **given)[0]

    def _config(self, budget: int) -> dict[str, Any]:
        setting, choice = self.setting, CHOICES[self.recipe.optimizer]

        def offload(tier: str) -> dict[str, Any]:
            return {"device": tier, **({"nvme_path": tempfile.gettempdir()} if tier == "nvme" else {})}

        zero: dict[str, Any] = {"stage": setting.stage, "sub_group_size": 16384}
        if setting.stage == 3:
            zero |= {**Thresholds(thresholds=setting.thresholds).zero, "offload_param": offload(setting.params)}
            zero["stage3_gather_16bit_weights_on_model_save"] = True
        if setting.stage:
            zero["offload_optimizer"] = offload(setting.states)
        config: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": setting.accumulation,
            "gradient_clipping": self.recipe.clipping,
            "zero_optimization": zero,
            "steps_per_print": 0,
            "io_daemon": {
                "host_budget_bytes": budget,
                "master_weights": "split" if setting.split else "fp32",
                "update": "in_step" if setting.update == "in_step" else "on_use",
                "update_in_backward": setting.update == "in_backward",
            },
        }
        if setting.dtype == "bf16":
            config["bf16"] = {"enabled": True}
        if setting.dtype == "fp16":
            power = {"initial_scale_power": SCALE_POWER, "loss_scale_window": SCALE_WINDOW, "hysteresis": 1}
            config["fp16"] = {"enabled": True, **power}
        if choice.section is not None:
            config["optimizer"] = choice.section
        return config

    @property
    def model(self) -> Walker:
        module: Walker = self.engine.module
        return module

    def param(self, name: str) -> Any:
        return self.model.get_parameter(name)

    # The loop

    def call(self, batch: int, direct: bool) -> Tensor:
        logits: Tensor = (self.model if direct else self.engine)(tokens_of(batch))
        if logits.requires_grad:
            self.losses.append(loss_of(logits, batch))
        return logits.detach()

    def arm(self, where: str) -> None:
        self.model.goes_wrong = where

    def backward(self, retain: bool, times: float = 1.0) -> Tensor:
        loss = self.losses[-1] if retain else self.losses.pop()
        returned: Tensor = self.engine.backward(loss * times, retain_graph=retain)
        return returned

    def zero_grad(self) -> None:
        infinity.Engine.zero_grad(
            self.engine
        )  # which begins the step anew; DeepSpeed's is refused between micro-batches

    def drop_gradient(self, name: str) -> None:
        self.param(name).grad = None

    def clip(self, max_norm: float) -> Tensor:
        norm: Tensor = self.engine.clip_grad_norm_(max_norm)
        return norm

    def step(self, **scheduled: Any) -> None:
        self.engine.step(**({"lr_kwargs": scheduled} if scheduled else {}))

    def grad_norm(self) -> float | None:
        norm: float | None = self.engine.get_global_grad_norm()
        return norm

    def set_accumulation(self, accumulation: int) -> None:
        self.engine.set_train_batch_size(accumulation * self.engine.world_size)

    def mode(self, training: bool) -> None:
        self.engine.train(training)

    def evaluate(self, batch: int, mode: str) -> Tensor:
        training = self.engine.training
        self.engine.eval()
        try:
            with torch.inference_mode() if mode == "inference" else torch.no_grad():
                logits: Tensor = self.engine(tokens_of(batch))
        finally:
            self.engine.train(training)
        return logits

    def use_branch(self, used: bool) -> None:
        self.model.uses_branch = used

    # The optimizer

    def option(self, name: str, value: Any) -> None:
        for group in self.engine.optimizer.param_groups:
            if name in group:
                group[name] = value

    def counters(self) -> dict[str, Any]:
        schedule = self.engine.lr_scheduler
        return {
            "lr": self.engine.get_lr(),
            "steps": self.engine.global_steps,
            "skipped": self.engine.skipped_steps,
            "scale": self.engine.optimizer.loss_scale,
            "last_lr": None if schedule is None else schedule.get_last_lr(),
            "training": self.engine.training,
        }

    def state(self, name: str, label: str) -> Tensor | None:
        return infinity.utils.safe_get_full_optimizer_state(self.param(name), label)

    def set_state(self, name: str, label: str, seed: int) -> None:
        param = self.param(name)
        infinity.utils.safe_set_full_optimizer_state(param, values_like(param, seed).abs(), label)

    # Weights

    def read(self, name: str, how: str) -> Tensor:
        param: Tensor = self.param(name)
        if how == "gathered":
            with infinity.zero.GatheredParameters(param):
                return param.detach().clone()
        if how == "together":
            with infinity.zero.GatheredParameters(self.model.parameters()):
                return param.detach().clone()
        return param.detach().clone()

    def write(self, name: str, seed: int, how: str) -> None:
        param = self.param(name)
        if how == "outside":
            with torch.no_grad():
                param.copy_(values_like(param, seed))
            return
        modifier = None if how == "unkept" else 0
        with infinity.zero.GatheredParameters(param, modifier_rank=modifier), torch.no_grad():
            if how == "part":
                param.view(-1)[:2] = values_like(param, seed).to(param.dtype).view(-1)[:2]
            elif how == "data":
                param.data = values_like(param, seed).to(param.dtype)
            else:
                param.copy_(values_like(param, seed))

    def master(self, name: str) -> Tensor | None:
        return infinity.utils.safe_get_full_fp32_param(self.param(name))

    def set_master(self, name: str, seed: int) -> None:
        param = self.param(name)
        infinity.utils.safe_set_full_fp32_param(param, values_like(param, seed))

    def gradient(self, name: str) -> Tensor | None:
        return infinity.utils.safe_get_full_grad(self.param(name))

    def set_gradient(self, name: str, seed: int) -> None:
        param = self.param(name)
        infinity.utils.safe_set_full_grad(param, values_like(param, seed))

    def weights(self) -> dict[str, Tensor]:
        found: dict[str, Tensor] = self.engine.full_state_dict()
        return found

    def all_masters(self) -> dict[str, Tensor]:
        found: dict[str, Tensor] = self.engine.full_master_state_dict()
        return found

    def load_weights(self, seed: int, how: str) -> None:
        state = seeded(self.recipe, seed).state_dict()
        if how == "part":
            state = {name: value for name, value in state.items() if name.startswith("head")}
        self.model.load_state_dict(state, strict=how != "part")

    # Files

    def save(self, tag: str, asynchronous: bool) -> None:
        self.engine.save_checkpoint(self.directory / "saved", tag, asynchronous=asynchronous)

    def load(self, tag: str, only: str) -> None:
        options: dict[str, dict[str, bool]] = {
            "module": {"load_module_only": True},
            "no states": {"load_optimizer_states": False},
            "no schedule": {"load_lr_scheduler_states": False},
        }
        self.engine.load_checkpoint(self.directory / "saved", tag, **options.get(only, {}))

    def export(self, tag: str) -> None:
        self.engine.save_16bit_model(self.directory / tag)

    def load_export(self, tag: str) -> None:
        infinity.load_pretrained(self.engine, self.directory / tag)

    # What only an engine has

    def offload(self, what: str) -> None:
        self.engine.offload_states(None if what == "all" else [infinity.zero.OffloadStateTypeEnum(what)])

    def reload(self) -> None:
        self.engine.reload_states()

    def empty_cache(self) -> None:
        self.engine.empty_partition_cache()

    def wait(self) -> None:
        self.engine.wait_for_checkpoint()

    def refused(self, what: str) -> None:
        """What an engine may refuse, and no more than that."""
        if what == "copy":
            copy.deepcopy(self.model)
        elif what == "step inside no_sync":
            with self.engine.no_sync():
                self.engine.step()
        elif what == "custom load":
            self.engine.load_checkpoint(self.directory / "saved", custom_load_fn=print)
        elif what == "no such tag":
            self.engine.load_checkpoint(self.directory / "saved", "nowhere")
        elif what == "state":
            self.engine.optimizer.state.clear()

    def close(self) -> None:
        self.engine.destroy()
