"""Which dtype each kind of state has, and what each costs on every tier. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

import torch

from infinity.config import Config
from infinity.plan.device_share import DeviceShare
from infinity.plan.narrow import Narrow, narrows_of
from infinity.plan.stage import StagePolicy
from io_daemon.shared.protocol import STATE_KINDS, ObjectKind

FP32 = torch.float32
REST: Final = torch.int16
"""The dtype of what a master is beside its weight."""
STATES_MASK: Final = 0xFF & ~ObjectKind.WEIGHT.mask
"""All that only trained chunks have."""
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def dtype_beside(weight: torch.dtype, dtype: torch.dtype, *, trainable: bool) -> torch.dtype:
    """What a weight that comes in ``dtype`` is where weights are to be in ``weight``. A frozen one that is narrower, or
    of bytes, stays as it came: fp32 has its every value, so that nothing is lost on any way through it."""
    return dtype if not trainable and dtype.itemsize < weight.itemsize else weight


@dataclass(frozen=True, slots=True, kw_only=True)
class Precision:
    weight: torch.dtype
    """The dtype of the module's parameters, and of forward and backward; of frozen ones see ``dtype_beside``."""
    reduce: torch.dtype
    """The dtype of the gradients' reduction."""
    gradient: torch.dtype
    """The dtype of the gradients kept until the update: the narrowest that loses nothing, unless one is asked for."""
    master: bool
    """Weights are 16-bit and an fp32 copy is kept; else the weights are the master weights."""
    keeps_weights: bool = True
    """The store has weights beside their masters. False: they are rounded from their masters, once an update where they
    are whole on the device, else for each gather, and the store has those of frozen parameters alone."""
    weights_stay: bool = False
    """Weights are whole on the device for good."""
    keeps_gradients: bool = True
    """Whether trained parameters have a gradient until the update. False: an engine without an optimizer."""
    rounds_sums: bool = False
    """Whether gradients are summed over a step's micro-batches, and the sum is reduced in fewer bits than it has."""
    update: torch.dtype = FP32
    """The dtype in which the optimizer computes."""
    states: Mapping[str, torch.dtype] = field(default_factory=dict)
    """The optimizer's states: what it calls each, and its dtype. In this order they have the kinds ``STATE_KINDS``."""
    markers: ObjectKind | None = None
    """The state whose signs complete masters that the store has as weight and rest; None: it has them whole."""
    narrows: Mapping[ObjectKind, Narrow] = field(default_factory=dict)
    """The states that the store has in fewer bits than ``states`` says."""

    @property
    def accumulates(self) -> bool:
        """Whether several gradients may be added up: in fp32 only."""
        return self.gradient is FP32

    @classmethod
    def of(
        cls,
        config: Config,
        states: Mapping[str, torch.dtype] | None = None,
        *,
        unsigned: Collection[ObjectKind] = (),
    ) -> Precision:
        """
        Args:
            states: None where the optimizer is not known yet, or nothing trains.
            unsigned: the kinds of states that are never negative.
        """
        weight = torch.float16 if config.fp16.enabled else torch.bfloat16 if config.bf16.enabled else FP32
        policy = StagePolicy.of(config)
        reduce = DTYPES[config.communication_data_type] if config.communication_data_type else None
        stepped_as_they_are = config.bf16.bf16_master_weights_and_grads
        gradient = FP32 if config.accumulates else reduce or weight
        if stepped_as_they_are:
            gradient = weight
        if config.data_types.grad_accum_dtype:
            gradient = DTYPES[config.data_types.grad_accum_dtype]
        sums_first = config.accumulates and not policy.reduces(boundary=False)
        master = weight is not FP32 and not stepped_as_they_are
        reduce = reduce or (gradient if sums_first else weight)
        return cls(
            weight=weight,
            reduce=reduce,
            gradient=gradient,
            rounds_sums=sums_first and reduce.itemsize < gradient.itemsize,
            master=master,
            keeps_weights=policy.shards_weights or not master,
            weights_stay=not policy.shards_weights,
            update=weight if config.bf16.bf16_optimizer_states else FP32,
            states=states or {},
            markers=next(iter(unsigned), None) if config.io_daemon.master_weights == "split" else None,
            narrows=narrows_of(config.io_daemon.moments, states or {}, unsigned),
        )

    def dtypes(self, *, trainable: bool, weight: torch.dtype | None = None) -> dict[int, torch.dtype]:
        """dtype by object kind of a chunk whose parameters are trainable, or frozen.

        Args:
            weight: of weights that stay in a dtype of their own.
        """
        kinds: dict[int, torch.dtype] = {}
        if self.keeps_weights or not trainable:
            kinds[ObjectKind.WEIGHT] = weight or self.weight
        if trainable:
            if self.keeps_gradients:
                kinds[ObjectKind.GRAD] = self.gradient
            if self.master:
                kinds[ObjectKind.MASTER] = FP32
            kinds.update(zip(STATE_KINDS, self.states.values(), strict=False))
        return kinds

    def stored_bytes(self, dtypes: Mapping[int, torch.dtype]) -> dict[int, float]:
        """Bytes of an element that the store has of each of ``dtypes``: the rest of a master is of 16 bits."""
        found: dict[int, float] = {kind: dtype.itemsize for kind, dtype in dtypes.items()}
        if self.markers is not None and ObjectKind.MASTER in found:
            found[ObjectKind.MASTER] = REST.itemsize
        return found | {kind: form.bytes_per_value for kind, form in self.narrows.items() if kind in found}

    def stored_as(self) -> dict[str, str]:
        """For people: what the store has of each kind of trained parameters, by what reports call it."""
        labels = {kind: label for label, kind in self.state_kinds.items()}
        names = {dtype: name for name, dtype in DTYPES.items()}
        found = {}
        for kind, dtype in self.dtypes(trainable=True).items():
            name = names.get(dtype, str(dtype).removeprefix("torch."))
            if kind == ObjectKind.MASTER and self.markers is not None:
                name = "16 bits beside the weight"
            elif kind in self.narrows:
                name = self.narrows[ObjectKind(kind)].value
            found[labels.get(ObjectKind(kind), ObjectKind(kind).name.lower())] = name
        return found

    @property
    def state_kinds(self) -> dict[str, ObjectKind]:
        """Kind of each of the optimizer's states, by what it calls it."""
        return dict(zip(self.states, STATE_KINDS, strict=False))

    def dtype(self, kind: ObjectKind) -> torch.dtype:
        """The dtype of a kind that trained parameters have, in the store or out of it."""
        return self.weight if kind is ObjectKind.WEIGHT else self.dtypes(trainable=True)[kind]

    def home(self, *, trainable: bool) -> ObjectKind:
        """The kind that the store has the weights in."""
        return ObjectKind.WEIGHT if self.keeps_weights or not trainable else ObjectKind.MASTER

    def lies_in_params(self, *, trainable: bool) -> bool:
        """Whether the store's weights are those on the device, once these are there, and have no memory of their
        own."""
        return self.weights_stay and self.home(trainable=trainable) is ObjectKind.WEIGHT

    @property
    def rounds_in_place(self) -> bool:
        """Whether an update is to put what it rounds of a trained master into the parameter."""
        return not self.keeps_weights and self.weights_stay

    @property
    def rounds_gathers(self) -> bool:
        """Whether gathering a trained weight is to round its master."""
        return not self.keeps_weights and not self.weights_stay

    def may_round_gathers(self, tiers: Tiers) -> bool:
        """Whether it could be, instead of copying the weight: a whole master is in the same memory."""
        are_beside = bool(tiers.host_mask & ObjectKind.WEIGHT.mask) == bool(tiers.host_mask & ObjectKind.MASTER.mask)
        return are_beside and self.master and self.keeps_weights and self.keeps_gradients and self.markers is None

    def remakes(self, tiers: Tiers) -> bool:
        """Whether trained weights stream and have whole masters beside, of which they can be made anew."""
        streams = self.keeps_weights and bool(tiers.nvme_mask & ObjectKind.WEIGHT.mask)
        return streams and self.master and self.markers is None

    @property
    def stepped(self) -> ObjectKind:
        """The kind that the optimizer steps."""
        return ObjectKind.MASTER if self.master else ObjectKind.WEIGHT


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiers:
    """Masks of kinds: on the device, in the daemon's arena for good, or streamed through it."""

    device_mask: int
    pinned_mask: int
    nvme_mask: int
    ratio: float = 1.0
    """The part of the trained elements that the masks hold for; the others keep all but their weights on the device."""

    @classmethod
    def of(cls, config: Config, precision: Precision, *, gradients_stay: bool = False) -> Tiers:
        """``gradients_stay``: gradients wait for their update on the device, whatever is offloaded."""
        zero = config.zero_optimization
        masks = {"none": 0, "cpu": 0, "nvme": 0}
        for kind in precision.dtypes(trainable=True) | precision.dtypes(trainable=False):
            offload = zero.offload_param if kind == ObjectKind.WEIGHT else zero.offload_optimizer
            stays = kind != ObjectKind.WEIGHT and zero.offload_optimizer.ratio == 0
            stays |= kind == ObjectKind.GRAD and gradients_stay
            masks["none" if stays else offload.device] |= 1 << kind
        return cls(
            device_mask=masks["none"],
            pinned_mask=masks["cpu"],
            nvme_mask=masks["nvme"],
            ratio=zero.offload_optimizer.ratio,
        )

    def device_masks(self, chunks: Iterable[tuple[int, bool]]) -> list[int]:
        """What each chunk keeps on the device: of some everything but the weight, see ``ratio``.

        Args:
            chunks: numel of each, and whether it is trained.
        """
        chunks = list(chunks)
        share = DeviceShare(sum(numel for numel, trained in chunks if trained), self.ratio)
        return [self.device_mask | (STATES_MASK if trained and share.take(numel) else 0) for numel, trained in chunks]

    @property
    def host_mask(self) -> int:
        return self.pinned_mask | self.nvme_mask
