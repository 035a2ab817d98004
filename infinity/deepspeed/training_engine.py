"""The engine with DeepSpeed's answers: where names clash, it answers as DeepSpeed's does."""

from __future__ import annotations

import atexit
import logging
import math
import os
import secrets
import threading
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

from infinity.checkpoint.manifest import MANIFEST, pieces_name
from infinity.checkpoint.model_states import write_model_states
from infinity.checkpoint.sealed import read_sealed
from infinity.checkpoint.writing import Files
from infinity.config import Config, read_environment
from infinity.deepspeed.asserted import asserted, asserting
from infinity.deepspeed.callers import locals_of
from infinity.deepspeed.client_states import packed, unpacked
from infinity.deepspeed.config_classes import DeepSpeedConfig, aio_of, get_log_level, optimizer_name
from infinity.deepspeed.constants import CHECKPOINT_PARALLEL_DIMS, CHECKPOINT_PP_DEGREE, CHECKPOINT_TP_DEGREE
from infinity.deepspeed.distributed import get_world_group
from infinity.deepspeed.kinds import get_zero_config
from infinity.deepspeed.logs import logger
from infinity.deepspeed.model_dtypes import as_given
from infinity.deepspeed.monitors import MonitorMaster
from infinity.deepspeed.questions import ABSENT, OF_CONFIG, OF_ZERO, data_types
from infinity.deepspeed.raw_config import section_of
from infinity.deepspeed.throughput import ThroughputTimer
from infinity.deepspeed.users_backward import UsersBackward
from infinity.deepspeed.version import DIALECT
from infinity.deepspeed.zero_config_classes import DeepSpeedZeroConfig
from infinity.engine import Engine
from infinity.engine.compiling import Compiled
from infinity.engine.handing_back import hand_back
from infinity.engine.loop import TrainingLoop
from infinity.errors import ConfigError, EngineStateError
from infinity.files.aside import remove
from infinity.observe.monitors import Monitor
from infinity.plan.precision import DTYPES
from infinity.plan.registered import named_buffers, named_parameters, parameters
from infinity.states import StepPhase
from infinity.weights.owners import owner_of
from infinity.zero import OffloadStateTypeEnum

SCRIPTS: Final[Mapping[str, str]] = {"zero_to_fp32.py": "recovery.py", "zero_to_torch.py": "conversion.py"}
"""What lies beside checkpoints, and the file here that it is a copy of."""

_log = logging.getLogger(__name__)
_exit = threading.Event()
"""The interpreter is about to end, and nobody will use a model any more."""

_NARROWED_LAYERS: Final = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)


@cache
def _watch_exit() -> None:
    """What was registered last is called first: before the engines' own finalizers, of which there is one by now."""
    atexit.register(_exit.set)


def _check_idle(loop: TrainingLoop) -> None:
    """Raises EngineStateError or WeightsError where the weights are not what the model is to go on with."""
    loop.phases.refuse_over("handing back weights")
    if loop.phases.phase is not StepPhase.IDLE or loop.phases.states_are_away:
        raise EngineStateError("its last step is not over, or its states are offloaded")
    loop.runtime.changes.settle()
    loop.runtime.changes.check()


class DeepSpeedEngine(Engine):
    """``infinity.Engine`` under DeepSpeed's calls. Made by ``infinity.deepspeed.initialize``."""

    _raw: Mapping[str, Any]
    _num_micro_steps: int
    _users_backward: UsersBackward
    buffers_follow_weights = resumes_loader = False
    deals_to_one = True
    gradient_average = enable_backward_allreduce = warn_unscaled_loss = True
    has_moe_layers = False
    mpu: Any = None
    """What was passed as such, by which every rank has the whole model."""
    sparse_tensor_module_names: frozenset[str] = frozenset()
    """Modules whose gradients are sparse: gradients are dense."""

    def speak(self, raw: Mapping[str, Any], added: Mapping[str, Any]) -> None:
        """``raw``: what the user gave as configuration; ``added``: what ``sections_for`` the model came to it."""
        self._raw, self._added = raw, added
        self._runtime.is_narrow_by_model = bool(added)
        self._num_micro_steps = 0
        self._has_handed_back = False
        """Destroyed, and the weights are the model's again."""
        by_accelerate = bool(locals_of("accelerate.accelerator", "_prepare_deepspeed"))
        self._users_backward = UsersBackward(self._loop, by_accelerate=by_accelerate)
        asks = by_accelerate or self.settings.zero_optimization.stage > 0
        if asks and self._loop.update is not None and not self.settings.io_daemon.update_in_backward:
            self._loop.update.ask_for_norm()
        if self._loop.update is not None and self._skips_overflow:
            self._loop.update.check_overflow()
        _watch_exit()
        timed = self.settings.timers.throughput.model_copy(update={"synchronized": False})  # it would slow every step
        self.tput_timer = ThroughputTimer(timed, batch_size=self.train_batch_size())
        self.loaded_checkpoint_dp_world_size: int | None = None
        self.loaded_checkpoint_mp_world_size: int | None = None
        if self.settings.log_level is not None:
            logging.Logger.setLevel(logger, self.settings.log_level.upper())  # its own is the Trainer's to call

    def __getattr__(self, name: str) -> Any:
        if name in OF_ZERO:
            return partial(OF_ZERO[name], self._zero)
        if name in OF_CONFIG:
            return partial(OF_CONFIG[name], self._as_given)
        try:
            return super().__getattr__(name)
        except AttributeError as error:
            if name in ABSENT:
                raise AttributeError(f"infinity's engine has no {name}: {ABSENT[name]}") from error
            raise

    def __dir__(self) -> list[str]:
        return [*object.__dir__(self), *OF_ZERO, *OF_CONFIG]

    # The configuration

    @property
    def config(self) -> Any:
        """The configuration as it was given, a dict; ``settings`` is infinity's own, typed, with defaults."""
        return self._raw

    @property
    def settings(self) -> Config:
        """What ``infinity.Engine.config`` is: the configuration as it is now, with its defaults."""
        return self._loop.config

    @property
    def _as_given(self) -> Config:
        return as_given(self._loop.config, self._raw, self._added)

    @property
    def _config(self) -> DeepSpeedConfig:
        return DeepSpeedConfig(self._raw)

    @property
    def _zero(self) -> DeepSpeedZeroConfig:
        return get_zero_config(self._raw)

    def optimizer_name(self) -> str | None:
        """What the function of this name says of the configuration."""
        return optimizer_name(self._raw)

    def optimizer_params(self) -> Mapping[str, Any] | None:
        """The parameters that the configuration gives it."""
        return section_of(self._raw, "optimizer").get("params")

    def scheduler_name(self) -> str | None:
        """The type that the configuration names, None if it names none."""
        name: str | None = section_of(self._raw, "scheduler").get("type")
        return name

    def scheduler_params(self) -> Mapping[str, Any] | None:
        """The parameters that the configuration gives it."""
        return section_of(self._raw, "scheduler").get("params")

    def steps_per_print(self) -> Any:
        """What the configuration says, None if it says nothing."""
        return self._raw.get("steps_per_print")

    def log_level(self) -> str | None:
        """What the configuration says, None if it says nothing."""
        return get_log_level(self._raw)

    def torch_autocast_lower_precision_safe_modules(self) -> list[str]:
        """The classes of layers that the configuration names, or those that autocast narrows."""
        named = section_of(self._raw, "torch_autocast").get("lower_precision_safe_modules")
        return [f"{kind.__module__}.{kind.__name__}" for kind in _NARROWED_LAYERS] if named is None else list(named)

    def aio_config(self) -> dict[str, Any]:
        """The section ``aio`` with DeepSpeed's defaults."""
        return aio_of(self._raw)

    def zero_allow_untested_optimizer(self) -> bool:
        """What the configuration says; every optimizer that can be sharded is taken anyhow."""
        return bool(self._raw.get("zero_allow_untested_optimizer", False))

    def checkpoint_tag_validation_enabled(self) -> bool:
        """Whether anything happens where ranks name different tags."""
        return self._tag_validation != "ignore"

    def checkpoint_tag_validation_fail(self) -> bool:
        """Whether that is an error."""
        return self._tag_validation == "fail"

    @property
    def _tag_validation(self) -> str:
        return str(section_of(self._raw, "checkpoint").get("tag_validation", "Warn")).lower()

    @property
    def _skips_overflow(self) -> bool:
        """Whether a step whose gradients are not all finite is left out. ZeRO does so in every dtype, but in bf16 where
        the configuration has no such section, or says no; stage 0 does so in 16 bits. An update inside backward has
        begun by then."""
        config, stage = self._loop.config, self._loop.config.zero_optimization.stage
        if config.io_daemon.update_in_backward:
            return False
        if config.bf16.enabled:
            return bool(section_of(self._raw, "bf16").get("check_grad_overflow", not self._added or stage == 3))
        return stage > 0

    def bfloat16_enabled(self) -> bool:
        """What the configuration says; a model in bf16 trains in it anyhow."""
        return self._as_given.bf16.enabled

    def fp16_enabled(self) -> bool:
        """What the configuration says; a model in fp16 trains in it anyhow."""
        return self._as_given.fp16.enabled

    def dynamic_loss_scale(self) -> bool:
        """Whether ``fp16.loss_scale`` is 0, with fp16 or without."""
        return self._loop.config.fp16.loss_scale == 0

    def get_data_types(self) -> tuple[torch.dtype, torch.dtype]:
        """The dtype of the weights in forward, and that in which gradients are added up."""
        return data_types(self._as_given)

    @property
    def communication_data_type(self) -> torch.dtype:
        """The dtype of the gradients' reduction."""
        config = self._as_given
        asked = config.communication_data_type
        return DTYPES[asked] if asked else data_types(config)[0]

    @property
    def monitor(self) -> MonitorMaster:
        """Where the configuration's monitors write, for figures of the script's own."""
        return MonitorMaster(self._loop.config, self._loop.observers.of(Monitor))

    # Ranks

    @property
    def local_rank(self) -> int:
        """This rank's number on its node."""
        return read_environment().local_rank

    @property
    def dp_world_size(self) -> int:
        """Ranks that share the model: all."""
        return self.world_size

    @property
    def mp_world_size(self) -> int:
        """1: there is no model parallelism."""
        return 1

    @property
    def data_parallel_group(self) -> Any:
        """The group of all ranks."""
        return get_world_group()

    def get_data_parallel_rank(self) -> int:
        """This rank among those that share the model."""
        return self.global_rank

    def get_model_parallel_rank(self) -> int:
        """0, the only one."""
        return 0

    def get_global_grad_norm(self) -> float | None:
        """What ``infinity.Engine.get_global_grad_norm`` gives; to Accelerate, whose ``clip_grad_norm_`` asks for it and
        clips nothing, from the first step on.

        Raises:
            ConfigError: the script clips by other numbers than the configuration, which ``step`` has clipped by.
        """
        asked = locals_of("accelerate.accelerator", "clip_grad_norm_")
        if asked:
            with asserting():
                self._refuse_other_clipping(asked["parameters"], float(asked["max_norm"]), float(asked["norm_type"]))
        return super().get_global_grad_norm()

    def _refuse_other_clipping(self, params: Any, max_norm: float, norm_type: float) -> None:
        given = {id(param) for param in ([params] if isinstance(params, torch.Tensor) else params)}
        layout, update, ours = self._runtime.sharded.layout, self._loop.update, self.gradient_clipping()
        trained = [] if update is None else update.grouped([param.requires_grad for param in layout.params])
        for name, param, is_trained in zip(layout.names, layout.params, trained, strict=False):
            if given and is_trained and id(param) not in given:  # behind the step nobody has a gradient to choose by
                remedy = "step() clips to the norm of all gradients: pass model.parameters()"
                raise ConfigError("parameters", f"without {name}", remedy)
        if norm_type != 2.0:
            raise ConfigError("norm_type", norm_type, "step() clips to the norm of type 2: leave norm_type out")
        if max_norm != (ours or math.inf):
            wanted = 0.0 if max_norm == math.inf else max_norm
            raise ConfigError(
                "gradient_clipping",
                ours,
                f"clip_grad_norm_() asks for {max_norm:g}, which Accelerate tells nobody, and step() clips to the "
                f'configuration: write "gradient_clipping": {wanted:g} into it, DeepSpeedPlugin(hf_ds_config=...)',
            )

    # The loop

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's own forward; a backward that reaches its outputs is seen, whoever runs it."""
        if self._has_handed_back:
            raise EngineStateError(
                f"the engine of {type(self.module).__name__} was destroyed, as by Accelerate's free_memory(): call "
                "deepspeed.initialize() once more, with the same model; where Transformers' Trainer has evaluated or "
                "trained before, write trainer.model_wrapped = trainer.model before trainer.train()"
            )
        self._users_backward.settle()
        self.tput_timer.start()
        outputs = super().forward(*args, **kwargs)
        self._users_backward.watch(outputs)
        return outputs

    @asserted
    def backward(
        self, loss: torch.Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True, **infinitys: Any
    ) -> torch.Tensor:
        """Accumulate the gradients of a scalar loss, as ``infinity.Engine.backward`` does."""
        self._users_backward.settle()
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            raise EngineStateError(
                f"backward() takes a scalar tensor, not {type(loss).__name__}: reduce the loss first"
            )
        if not loss.requires_grad:
            raise EngineStateError(
                "backward() takes a loss with a graph, and this one was computed without: call the engine outside of "
                "torch.no_grad(), on parameters of which one requires a gradient"
            )
        UsersBackward.opened.clear()
        differentiated = super().backward(loss, retain_graph, scale_wrt_gas, **infinitys)
        self._refuse_untrained()
        return differentiated

    def _refuse_untrained(self) -> None:
        """Raises EngineStateError where the backward gave gradients to an engine that nobody will step by them:
        Accelerate steps one engine of an Accelerator, the first."""
        reached = UsersBackward.opened
        beside = getattr(locals_of("accelerate.accelerator", "backward").get("self"), "_models", ())
        is_beside = any(isinstance(each, DeepSpeedEngine) and each._users_backward in reached for each in beside)
        if is_beside or (reached and not self._runtime.reducer.has_taken):
            raise EngineStateError(
                f"the backward of the engine of {type(self.module).__name__} gave gradients to another engine, which "
                "its step() does not step: make one Accelerator for each model, and call backward() of the one that "
                "prepared it"
            )

    @asserted
    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss times the loss scale, for a ``loss.backward()`` of one's own; without fp16 the loss itself."""
        return self._users_backward.scale(loss)

    @asserted
    def step(self, lr_kwargs: Mapping[str, Any] | None = None) -> None:
        """End a micro-batch, as ``infinity.Engine.step`` does."""
        self._users_backward.settle()
        is_boundary = self._loop.is_boundary()
        super().step(lr_kwargs)
        self._num_micro_steps += 1
        self.tput_timer.stop(global_step=is_boundary)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop what the running step has accumulated. As in DeepSpeed's, no gradient of zeros is left.

        Raises:
            EngineStateError: between the micro-batches of a step, where scripts call it behind every ``step``: it would
                begin the step anew each time, and nothing would ever be updated.
        """
        self._users_backward.settle()
        self._loop.refuse_between("engine.zero_grad()")
        super().zero_grad()

    def no_sync(self) -> AbstractContextManager[None]:
        """Inside, gradients stay whole on their rank, as in ``infinity.Engine.no_sync``: at stages 0 and 1 alone."""
        with asserting():
            return super().no_sync()

    def allreduce_gradients(self, bucket_size: int = 500_000_000) -> None:
        """Nothing is left to do: ``backward`` and ``step`` reduce gradients, by the configuration's buckets."""
        self._runtime.refuse_over("allreduce_gradients()")

    @contextmanager
    def coalesce_grad_reduction(self) -> Iterator[None]:
        """Inside, several backwards belong to one step, which comes after the block. What is reduced when is the
        stage's own."""
        boundary, self._loop.boundary = self._loop.boundary, False
        before = self._num_micro_steps
        try:
            yield
        finally:
            self._loop.boundary = boundary
        if self._num_micro_steps != before:
            raise EngineStateError("step() belongs behind the block of coalesce_grad_reduction()")

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether the next ``step`` updates; where the script decides on that (``managed_gradient_accumulation``
        false), only while ``step`` runs."""
        loop = self._loop
        is_free = not loop.config.managed_gradient_accumulation and loop.boundary is None
        return loop.phases.phase is StepPhase.OPTIMIZER if is_free else loop.is_boundary()

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Change the steps of accumulation, as ``infinity.Engine.set_train_batch_size`` does."""
        with asserting():
            super().set_train_batch_size(train_batch_size)

    @property
    def training_dataloader(self) -> Any:
        """The loader that ``initialize`` made of its ``training_data``, or what the script has put in its place."""
        return vars(self).get("_training_dataloader", self._loop.training_loader)

    @training_dataloader.setter
    def training_dataloader(self, loader: Any) -> None:
        vars(self)["_training_dataloader"] = loader

    def devices_of(self, state: OffloadStateTypeEnum) -> set[torch.device]:
        """Where states of the type are. What streams from disk comes to host memory."""
        return self._offloaded.devices_of(state)

    @property
    def micro_steps(self) -> int:
        """Calls of ``step`` so far."""
        return self._num_micro_steps

    def get_mom(self) -> list[Any]:
        """Momentum of each param group: its betas, or what SGD and RMSprop call so."""
        groups = [] if self.optimizer is None else self.optimizer.param_groups
        return [group["betas"] if "betas" in group else group.get("momentum") for group in groups]

    def get_type(self) -> list[Any]:
        """What each param group calls its type, if it does."""
        return [group.get("type", 0.0) for group in (self.optimizer.param_groups if self.optimizer is not None else ())]

    @property
    def basic_optimizer(self) -> Any:
        """The optimizer that was passed, or the engine's."""
        return None if self.optimizer is None else self.optimizer.taken_over or self.optimizer

    # Weights

    def destroy(self, keep_weights: bool = True) -> None:
        """End the engine. The model keeps its weights, as after DeepSpeed's: it may get another engine. Collective.

        Args:
            keep_weights: False, as in ``infinity.Engine.destroy``: they go with the engine, and nothing is read.
        """
        if self._runtime.collectives.is_forked:
            return
        if "_users_backward" in vars(self):  # not where ``initialize`` is refused before the engine could ``speak``
            self._users_backward.settle()
        if keep_weights and self._loop.phases.phase is StepPhase.IDLE:
            hand_back(self._runtime, self._loop.config)
            self._has_handed_back = True
        hooks = getattr(self.optimizer, "parameter_offload", None)
        if hooks is not None:
            hooks.remove()
        super().destroy()

    @staticmethod
    def _end_collected(compiled: Compiled, loop: TrainingLoop) -> None:
        """The model keeps its weights, as after ``destroy``: whoever drops an engine may make another of its model."""
        if not _exit.is_set():
            try:
                what = "hand back the weights of an engine that nobody holds"
                loop.runtime.collectives.together(partial(_check_idle, loop), what)
                hand_back(loop.runtime, loop.config)
            except Exception as error:  # noqa: BLE001 (there is nobody to raise it to)
                _log.warning("the weights of an engine that was let go of are not handed back: %s", error)
        Engine._end_collected(compiled, loop)

    def holds(self, model: nn.Module) -> bool:
        """Whether weights of ``model`` are this engine's."""
        return any(owner_of(param) is self._runtime for param in parameters(model))

    def module_state_dict(
        self,
        destination: Any = None,
        prefix: str = "",
        keep_vars: bool = False,
        exclude_frozen_parameters: bool = False,
    ) -> dict[str, Any]:
        """The module's own state dict. Its sharded weights can be read inside ``zero.GatheredParameters``."""
        given = {} if destination is None else {"destination": destination}
        state: dict[str, Any] = self.module.state_dict(**given, prefix=prefix, keep_vars=keep_vars)
        for name, param in named_parameters(self.module) if exclude_frozen_parameters else ():
            if not param.requires_grad:
                state.pop(f"{prefix}{name}", None)  # a module's own state_dict() may lack it
        return state

    def save_fp16_model(self, save_dir: str | os.PathLike[str], save_filename: str = "pytorch_model.bin") -> bool:
        """An old name of ``save_16bit_model``."""
        return self.save_16bit_model(save_dir, save_filename)

    def save_16bit_model(
        self,
        save_dir: str | os.PathLike[str],
        save_filename: str | None = "pytorch_model.bin",
        exclude_frozen_parameters: bool = False,
        **infinitys: Any,
    ) -> bool:
        """Write weights as ``infinity.Engine.save_16bit_model`` does, by default into one file of ``torch.save``'s.

        At stage 3 without ``stage3_gather_16bit_weights_on_model_save`` nothing is written and False is given, as by
        DeepSpeed."""
        if self.zero_optimization_stage() == 3 and not self.zero_gather_16bit_weights_on_model_save():
            return False
        return super().save_16bit_model(save_dir, save_filename, exclude_frozen_parameters, **infinitys)

    def save_pretrained(self, save_directory: str | os.PathLike[str], **words: Any) -> None:
        """Write a model of Transformers as ``infinity.Engine.save_pretrained`` does. Another, as PEFT's, or one with
        words of its own method, writes itself by that on rank 0, from all weights in memory. Collective.

        Args:
            words: arguments of ``infinity.Engine.save_pretrained``, or of the module's own.
        """
        module: Any = self.module
        own = getattr(type(module), "save_pretrained", None)
        is_plain = own is None or (
            own.__qualname__ == "PreTrainedModel.save_pretrained"
            and not getattr(module, "_hf_peft_config_loaded", False)
        )
        if is_plain and words.keys() <= {"beside", "safe_serialization", "max_shard_size"}:
            super().save_pretrained(save_directory, **words)
            return
        if "state_dict" not in words:
            words["state_dict"] = self.full_state_dict(rank0_only=True)

        def save() -> None:
            if self.global_rank == 0:
                module.save_pretrained(save_directory, **words)

        self._runtime.collectives.together(save, "save the model by its own save_pretrained()")

    def save_checkpoint(
        self,
        save_dir: str | os.PathLike[str],
        tag: str | None = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool | None = False,
        *,
        asynchronous: bool = False,
    ) -> bool:
        """Save as ``infinity.Engine.save_checkpoint`` does, and ``zero_to_fp32.py`` and ``zero_to_torch.py`` beside it.

        Below stage 3, where weights are whole, ``mp_rank_00_model_states.pt`` has them, too, as scripts read them there
        (``["module"]``); not of an asynchronous save. Ranks that name different tags save under rank 0's: a checkpoint
        is one for all. They do so with a warning, without one or not at all, as ``checkpoint.tag_validation`` says.
        ``client_state`` may hold objects of any class that can be pickled.
        """
        exclude_frozen = bool(exclude_frozen_parameters)  # frameworks pass None on

        def write_states(aside: Path) -> Files:
            state = self._model_states(client_state or {}, exclude_frozen=exclude_frozen)
            return write_model_states(aside, state) if self.global_rank == 0 else {}

        self._save_checkpoint(
            save_dir,
            self._common_tag(tag),
            packed(client_state),
            bool(save_latest),
            exclude_frozen,
            asynchronous=asynchronous,
            write_more=None if asynchronous or self.zero_optimization_partition_weights() else write_states,
        )
        for name, ours in SCRIPTS.items() if self.global_rank == 0 else ():
            self._put_script(Path(save_dir) / name, Path(__file__).with_name(ours).read_text())
        return True

    def _model_states(self, client_state: Mapping[str, Any], *, exclude_frozen: bool) -> dict[str, Any]:
        """What DeepSpeed's file of a model has, but for what belongs to its shards. Hooks of a module's may ask all
        ranks, as any call of ``state_dict()``."""
        module = self.module_state_dict(exclude_frozen_parameters=exclude_frozen)
        schedule: Any = self._loop.lr_scheduler
        return {
            "module": module,
            "buffer_names": [name for name, _ in named_buffers(self.module, remove_duplicate=False) if name in module],
            "lr_scheduler": schedule.state_dict() if hasattr(schedule, "state_dict") else None,
            **self._loop.counters,
            "dp_world_size": self.world_size,
            "mp_world_size": 1,
            CHECKPOINT_PARALLEL_DIMS: {CHECKPOINT_PP_DEGREE: 1, CHECKPOINT_TP_DEGREE: 1},
            "ds_config": self.config,
            "ds_version": DIALECT,
            **client_state,
        }

    def _put_script(self, script: Path, text: str) -> None:
        """A script beside checkpoints, whole or as it was. They are whole without it: what fails is logged, and this
        rank goes on as the others do."""
        aside = script.with_name(f".infinity-{secrets.token_hex(4)}-{script.name}")
        try:
            aside.write_text(text)
            aside.replace(script)
        except OSError as error:
            logger.warning("%s cannot be written (%s): `infinity export` does what it is for", script, error)
            remove(aside)
            return
        self._change_recovery_script_permissions(script)

    def _common_tag(self, tag: str | None) -> str | None:
        self._runtime.refuse_over("save_checkpoint")
        tags: list[str | None] = self._runtime.collectives.gather_objects(tag, "compare the tags of a checkpoint")
        if any(other != tags[0] for other in tags):
            if self.checkpoint_tag_validation_fail():
                with asserting():
                    raise ConfigError("checkpoint.tag_validation", "Fail", f"ranks name the tags {tags}: name one")
            if self.checkpoint_tag_validation_enabled() and self.global_rank == 0:
                logger.warning("ranks name the tags %s: all save under the first", tags)
        return tags[0]

    def _change_recovery_script_permissions(self, dst: str | os.PathLike[str]) -> None:
        """Make a script executable; where the file system does not allow it, that is logged and nothing else."""
        try:
            Path(dst).chmod(Path(dst).stat().st_mode | 0o111)
        except OSError as error:
            logger.info("%s cannot be made executable (%s): run it by python", dst, error)

    def _get_optimizer_ckpt_name(self, checkpoints_path: str, tag: str, expp_rank: int = 0) -> str:
        """The file of a checkpoint that this rank's states go to. Experts have none of their own."""
        return os.path.join(checkpoints_path, str(tag), pieces_name(self.global_rank))

    def load_checkpoint(self, *args: Any, **kwargs: Any) -> tuple[str | None, dict[str, Any] | None]:
        """Go on as ``infinity.Engine.load_checkpoint`` does. Random numbers go on where they were saved only before the
        engine's first step, and where all is loaded. The loader of ``training_data`` begins its epoch anew, as
        DeepSpeed's does: scripts pass over what they have had."""
        self._users_backward.settle()
        with asserting():
            path, state = super().load_checkpoint(*args, **kwargs)
        if path is not None:
            manifest, _ = read_sealed(Path(path) / MANIFEST)
            self.loaded_checkpoint_dp_world_size, self.loaded_checkpoint_mp_world_size = manifest["world_size"], 1
        return path, unpacked(state)

    def _rewinds_random_numbers(self, *, whole: bool) -> bool:
        """A training that goes on in another process draws where it stood; one that goes back to weights of its own, as
        the Trainer does to the best ones, draws on, as in plain torch."""
        return whole and self._num_micro_steps == 0
