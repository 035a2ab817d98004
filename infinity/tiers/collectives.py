"""The collectives, in one place: torch 2.13 renamed two of them and deprecated the old names.

All take contiguous 1-D tensors. With one rank they are copies, and no process group is needed. What ranks say to each
other before a collective are words for people, too: they are what an error shows.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from hashlib import blake2b
from typing import Any, Final, TypeVar, cast

import torch
import torch.distributed as dist

from infinity.errors import WorldError
from infinity.observe.comms import CommsLog
from infinity.plan.stage import Gathering, Reduction, StagePolicy
from infinity.tiers.maximum import spread_maximum
from infinity.tiers.reductions import OrderedReduce, OrderedScatter, Reducing, Scaled, gather, scatter
from infinity.tiers.said import in_words
from infinity.tiers.world import Peers, used_device

_log = logging.getLogger(__name__)

PARTING_TIMEOUT_S: Final = 60.0
"""How long a rank that ends waits for those that do not; then it ends alone."""

EVALUATING: Final = "begin an evaluating forward"
KEEPING: Final = "keep what was written to"
_REMEDIES: Final = (
    ((EVALUATING,), "Below stage 3, where weights are whole, one rank alone may evaluate by engine.module(...)"),
    (
        (KEEPING,),
        (
            "What one rank writes to weights it writes inside infinity.zero.GatheredParameters(param, "
            "modifier_rank=its number), which gives it to all"
        ),
    ),
    (
        ("a checkpoint", "the checkpoint", "files for weights"),
        (
            "Checkpoints and files of weights are saved by all ranks together: call it on every rank, and not behind "
            "`if rank == 0`"
        ),
    ),
)
"""What ranks that diverge are told beside, where what one of them was about to do has such words, which no parameter's
name has."""
_REDUCE: Final = "reduce gradients"

Result = TypeVar("Result")


class Collectives:
    """Collectives among the ranks that share one model; ``peers`` None means one rank, no communication.

    Before each, all ranks agree that they are about to do the same: otherwise one rank would take another's bytes for
    what it asked for, or wait for what never comes. Only reductions inside one backward need no words of their own:
    all ranks agree that it begins and ends, and in between they reduce the same groups in the same order.
    """

    def __init__(self, peers: Peers | None) -> None:
        self._joined = peers
        self._peers = peers if peers is not None and peers.world_size > 1 else None
        self._number = peers.num_joined if peers is not None else 0
        self._whose = f"what joined as number {self._number}"
        self.rank = peers.rank if peers is not None else 0
        self.world_size = peers.world_size if peers is not None else 1
        self.log = CommsLog()
        self._pid = os.getpid()
        self._gathering = Gathering.ALL_GATHER
        self._divisor, self._factor = float(self.world_size), 1.0
        """What gradients are divided by before they are summed, and what sums are multiplied by."""

    @classmethod
    def join(cls, group: dist.ProcessGroup | None = None) -> Collectives:
        """With the ranks of ``group``, by default all. See ``Peers.join``. What all have let go of ends before."""
        collectives = cls(Peers.join(group))
        try:
            collectives._end_what_all_let_go()
        except BaseException:
            collectives.close()
            raise
        return collectives

    def joined_again(self) -> Collectives:
        """Another user of the same ranks, to be closed by itself."""
        return Collectives.join(None if self._joined is None else self._joined.data)

    def follow(self, policy: StagePolicy) -> None:
        """Gather and reduce as the policy says, as the next engine of these ranks. Collective."""
        self._gathering = policy.gathering
        self._divisor = float(policy.predivide_factor or self.world_size) if policy.averages else 1.0
        self._factor = self._divisor / self.world_size if policy.averages else 1.0
        if self._peers is None:
            return
        self._peers.num_engines += 1
        self._whose = f"engine {self._peers.num_engines}"
        if policy.reduction is Reduction.ALL_REDUCE and used_device().type == "cpu":
            self._peers.add_group_for_results()

    def is_among_ranks_of(self, other: Collectives) -> bool:
        """A rank that is alone is itself, be there a process group around it or none yet."""
        return self._joined is other._joined or self.world_size == other.world_size == 1

    @property
    def num_divergences(self) -> int:
        """How often the ranks, of whatever engine, were told that they had diverged: the same on all of them."""
        return self._peers.num_divergences if self._peers is not None else 0

    def close(self) -> None:
        """Leave the ranks. Idempotent."""
        joined, self._joined, self._peers = self._joined, None, None
        if joined is not None:
            joined.release()

    def let_go(self, end: Callable[[], None]) -> None:
        """Nobody holds on this rank what communicates here: call ``end``, in which ranks part, once that holds on all.

        That is known when they meet the next time to join, or at exit; a rank that is alone knows at once. In a forked
        child nothing ends: it is the parent's.
        """
        if self.is_forked:
            return
        if self._peers is None or self._peers.control is None:
            end()
        else:
            self._peers.let_go[self._number] = end

    def _end_what_all_let_go(self) -> None:
        if self._peers is None or self._peers.num_joined == 1:
            return
        told = self.gather_objects(set(self._peers.let_go), "begin, after what nobody holds any more has ended")
        for number in sorted(set.intersection(*told)):
            end = self._peers.let_go.pop(number, None)
            if end is not None:  # what ended before it may have met the others, too
                end()

    @property
    def is_forked(self) -> bool:
        """Whether this is a copy in a process that the rank has forked, which has no part in what is open."""
        return os.getpid() != (self._pid if self._peers is None else self._peers.pid)

    def agree(self, what: str, failure: str = "") -> None:
        """Tell the other ranks that this one is about to do ``what``, or of which ``failure`` it cannot. Raises
        WorldError, on every rank and with every rank's words, unless all are about to do the same, and can; and in a
        forked child, whom they would not hear."""
        if self._peers is None:
            return
        if self.is_forked:
            raise WorldError(f"{what}: a forked process is none of the ranks: do it in its parent")
        _agree(self._peers, (what, self._whose, failure), self._peers.timeout_s)

    def are_alike(self, text: str, what: str) -> bool:
        """Whether every rank has this text, of which nobody is sent more than a number."""
        return not self.unlike([text], what)

    def unlike(self, texts: Sequence[str | None], what: str) -> list[int]:
        """The places of ``texts``, as many on all ranks, that are not alike on those that have one there."""
        if not texts:
            return []
        extremes = torch.tensor([_NOBODYS if text is None else _extremes(text) for text in texts], device="cpu")
        self.max(extremes, what)
        return [place for place, found in enumerate(extremes.tolist()) if found != _NOBODYS and not _is_one(*found)]

    def first_unlike(self, lines: Sequence[str], what: str) -> list[str]:
        """The first line that is not the same on all ranks, as each of them has it; nothing if all are. "nothing"
        stands for a line that a rank has not."""
        if self.are_alike("\n".join(lines), what):
            return []
        num_lines = max(self.gather_objects(len(lines), what))
        padded = [*lines, *["nothing"] * (num_lines - len(lines))]
        first = min(self.unlike(padded, what), default=None)
        return [] if first is None else self.gather_objects(padded[first], what)

    def prepared(self, prepare: Callable[[], Result], what: str) -> Result:
        """What ``prepare`` gives, when every rank has it and is about to do ``what`` with it.

        Where one has no memory for its part, or cannot read it, the others are told instead of waiting for it in the
        collective: they raise WorldError, and it raises its own error.
        """
        try:
            result = prepare()
        except Exception as error:
            with suppress(WorldError):
                self.agree(what, f"{type(error).__name__}: {error}")
            raise
        self.agree(what)
        return result

    def part(self) -> None:
        """This rank is about to leave: wait until all are, within a limit. What is left on the way is not judged."""
        if self._peers is None or not dist.is_initialized():  # the interpreter may have ended it first
            return
        try:
            _agree(self._peers, ("the end: destroy()", "", ""), min(PARTING_TIMEOUT_S, self._peers.timeout_s))
        except WorldError as error:
            _log.warning("the ranks do not end together: %s", error)

    def all_gather(self, output: torch.Tensor, shard: torch.Tensor) -> None:
        """``output`` [world_size * numel] becomes the shards [numel] of all ranks in order. Agree before it."""
        if self._peers is None:
            output.copy_(shard)
            return
        output, shard = _carried(output), _carried(shard)
        with _in_words("gather weights", self._peers):
            match self._gathering:
                case Gathering.ALL_GATHER:
                    with self.log.timed("all_gather", output.nbytes):
                        gather(output, shard, group=self._peers.data)
                case Gathering.BROADCASTS:
                    self._broadcast_each(output.view(self.world_size, -1), shard, self._peers)
                case Gathering.ALL_REDUCE:
                    output.zero_().view(self.world_size, -1)[self.rank].copy_(shard)
                    with self.log.timed("all_reduce", output.nbytes):  # of bytes: -0.0 + 0.0 is 0.0
                        dist.all_reduce(output.view(torch.uint8), group=self._peers.data)

    def _broadcast_each(self, parts: torch.Tensor, shard: torch.Tensor, peers: Peers) -> None:
        parts[self.rank].copy_(shard)
        for source, part in enumerate(parts):
            with self.log.timed("broadcast", part.nbytes):
                dist.broadcast(part, group_src=source, group=peers.data)

    def reduce_scatter_mean(self, output: torch.Tensor, full: torch.Tensor) -> Reducing:
        """Issue: ``output`` [numel] becomes this rank's part of the mean over ranks of ``full`` [world_size * numel].

        Divides first, as DDP does, so that sums stay in range, by ``gradient_predivide_factor`` if there is one; not at
        all where ``gradient_allreduce_op`` asks for sums. ``full`` is overwritten. Reductions have a process group of
        their own: ranks may reach them at different points of their gathers without a deadlock.
        """
        peers, factor = self._divided(full)
        with _in_words(_REDUCE, peers), self.log.timed("reduce_scatter", full.nbytes):
            if full.device.type == "cpu":
                return _ReducingInWords(OrderedScatter(output, full, peers.group_for_reductions, factor), peers)
            work = scatter(output, full, op=dist.ReduceOp.SUM, group=peers.reductions, async_op=True)
            return _ReducingInWords(Scaled(work, output, factor), peers)

    def all_reduce_mean(self, full: torch.Tensor) -> Reducing:
        """Issue: ``full`` becomes its mean over ranks, with the bits of ``reduce_scatter_mean``."""
        peers, factor = self._divided(full)
        with _in_words(_REDUCE, peers), self.log.timed("all_reduce", full.nbytes):
            if full.device.type == "cpu":
                reductions, results = peers.group_for_reductions, peers.group_for_results
                return _ReducingInWords(OrderedReduce(full, reductions, results, self.world_size, factor), peers)
            work = dist.all_reduce(full, group=peers.reductions, async_op=True)
            return _ReducingInWords(Scaled(work, full, factor), peers)

    @property
    def num_reductions(self) -> int:
        """Reductions that were begun on this rank among these ranks, by this user of them or another."""
        return self._peers.num_reductions if self._peers is not None else 0

    def _divided(self, full: torch.Tensor) -> tuple[Peers, float]:
        """Whom it is summed over, and what is left to multiply the sum by."""
        if self._peers is None:
            raise AssertionError("one rank has nothing to reduce")
        full.div_(self._divisor)
        self._peers.num_reductions += 1
        return self._peers, self._factor

    def receive_from_previous(self, tensor: torch.Tensor) -> None:
        """``tensor``, on the CPU, becomes what the rank before this one sends. All ranks have agreed to pass it on."""
        if self._peers is not None:
            what = "take what the rank before passes on"
            with _in_words(what, self._peers), self.log.timed("recv", tensor.nbytes, what):
                dist.recv(tensor, group=self._peers.control, group_src=self.rank - 1)

    def send_to_next(self, tensor: torch.Tensor) -> None:
        """The other end of ``receive_from_previous``."""
        if self._peers is not None:
            what = "pass something on to the next rank"
            with _in_words(what, self._peers), self.log.timed("send", tensor.nbytes, what):
                dist.send(tensor, group=self._peers.control, group_dst=self.rank + 1)

    def sum(self, tensor: torch.Tensor, what: str) -> None:
        """``tensor`` is on the CPU."""
        if self._peers is not None:
            self.agree(what)
            with _in_words(what, self._peers), self.log.timed("all_reduce", tensor.nbytes, what):
                dist.all_reduce(tensor, group=self._peers.control)

    def max(self, tensor: torch.Tensor, what: str) -> None:
        """``tensor`` is on the CPU."""
        if self._peers is not None:
            self.agree(what)
            with _in_words(what, self._peers), self.log.timed("all_reduce", tensor.nbytes, what):
                _spread_maximum(tensor, self._peers, self._peers.timeout_s)

    def broadcast(self, tensor: torch.Tensor, what: str, *, source: int = 0) -> None:
        """The values of rank ``source`` become everybody's; on any device."""
        if self._peers is not None:
            self.agree(what)
            group = self._peers.control if tensor.device.type == "cpu" else self._peers.data
            with _in_words(what, self._peers), self.log.timed("broadcast", tensor.nbytes, what):
                dist.broadcast(_carried(tensor), group_src=source, group=group)

    def broadcast_object(self, value: object, what: str) -> Any:
        """``value`` of rank 0."""
        if self._peers is None:
            return value
        self.agree(what)
        box = [value]
        with _in_words(what, self._peers), self.log.timed("broadcast_object", 0, what):
            dist.broadcast_object_list(box, src=self._peers.root, group=self._peers.control)
        return box[0]

    def gather_objects(self, value: object, what: str) -> list[Any]:
        """``value`` of every rank, in rank order."""
        if self._peers is None:
            return [value]
        self.agree(what)
        box: list[Any] = [None] * self.world_size
        with _in_words(what, self._peers), self.log.timed("gather_objects", 0, what):
            dist.all_gather_object(box, value, group=self._peers.control)
        return box

    def together(
        self, work: Callable[[], Result], what: str, *, as_error: Callable[[str], WorldError] = WorldError
    ) -> Result:
        """Run ``work`` on every rank; if it fails on any, every rank raises: its own error, or who failed how, of which
        ``as_error`` makes one."""
        result: Result | None = None
        error: BaseException | None = None
        num_divergences = self.num_divergences
        try:
            result = work()
        except Exception as raised:
            if self.num_divergences != num_divergences:
                raise  # the other ranks know
            error = raised  # raised again below, when they do
        failure = "" if error is None else f"{type(error).__name__}: {error}"
        # words travel where somebody has some: of thousands of ranks they are many to read before each step of a save
        failures = [] if self.are_alike(failure, what) else self.gather_objects(failure, what)
        if error is not None:
            raise error
        for rank, theirs in enumerate(failures):
            if theirs:
                raise as_error(f"rank {rank} failed: {theirs}")
        return cast(Result, result)


class _ReducingInWords:
    """A reduction whose errors say what this rank was about to do."""

    def __init__(self, reducing: Reducing, peers: Peers) -> None:
        self._reducing, self._peers = reducing, peers

    def is_completed(self) -> bool:
        with _in_words(_REDUCE, self._peers):
            return self._reducing.is_completed()

    def wait(self) -> None:
        with _in_words(_REDUCE, self._peers):
            self._reducing.wait()


_Words = tuple[str, str, str]
"""What a rank is about to do, of which user of the ranks, of whom all may have the same words, and why it cannot."""


def _carried(tensor: torch.Tensor) -> torch.Tensor:
    """Its bytes where they are values of 8 bits, whose dtypes not every backend knows."""
    return tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor


def _agree(peers: Peers, told: _Words, timeout_s: float) -> None:
    """Raises WorldError, on every rank and with every rank's words, unless all say the same. ``timeout_s``: for each
    message on its way."""
    with _in_words(told[0], peers):
        extremes = torch.tensor(_extremes(*told), device="cpu")
        _spread_maximum(extremes, peers, timeout_s)
        if _is_one(*extremes.tolist()):
            return
        theirs: list[Any] = [None] * peers.world_size
        dist.all_gather_object(theirs, told, group=peers.control)
    peers.num_divergences += 1
    raise WorldError(_diverged(theirs))


def _extremes(*words: str) -> tuple[int, int]:
    """The words as one number of 64 bits with a sign, and its complement, whose maximum over ranks is that of the
    smallest. The number is equal on all ranks if and (but for one chance in 2^64) only if the words are."""
    data = "\0".join(words).encode(errors="surrogatepass")
    number = int.from_bytes(blake2b(data, digest_size=8).digest(), "little", signed=True)
    return number, ~number


def _is_one(largest: int, of_smallest: int) -> bool:
    """Whether the largest and the smallest, of which this is the complement, are one number."""
    return largest == ~of_smallest


_NOBODYS: Final = [-(1 << 63)] * 2


def _spread_maximum(values: torch.Tensor, peers: Peers, timeout_s: float) -> None:
    peers.num_spread += 1
    spread_maximum(values, peers.group_for_control, peers.num_spread, timeout_s)


def _diverged(told: Sequence[_Words]) -> str:
    """``told``: what each rank has said."""
    if len({(what, whose) for what, whose, _ in told}) == 1:
        failures = ((rank, failure) for rank, (*_, failure) in enumerate(told) if failure)
        return f"all ranks were about to {told[0][0]}, and {in_words(failures, ' failed: ')}"
    differ = len({whose for _, whose, _ in told if whose}) > 1

    def words(what: str, whose: str, failure: str) -> str:
        return f"{what}{f' of {whose}' if differ and whose else ''}{f', which failed: {failure}' if failure else ''}"

    remedies = [remedy for parts, remedy in _REMEDIES if any(part in what for what, *_ in told for part in parts)]
    apart = in_words(((rank, words(*said)) for rank, said in enumerate(told)), ": ")
    return (
        f"the ranks diverge: each is about to do something else ({apart}). All ranks must make the same "
        "calls in the same order, of modules too, and train with the same options. Where the data decides which "
        "modules are called (a mixture of experts), mark the one that decides, before infinity.initialize(): "
        "infinity.zero.set_leaf_modules(model, [its class])"
        f"{''.join(f'. {remedy}' for remedy in remedies)}"
    )


@contextmanager
def _in_words(what: str, peers: Peers) -> Iterator[None]:
    """Torch's errors say what broke, not what this rank was about to do."""
    try:
        yield
    except WorldError:
        raise
    except ValueError as error:
        if not _were_destroyed(peers):
            raise
        raise WorldError(
            f"rank {peers.rank} of {peers.world_size} was about to {what}, and torch's process groups were destroyed: "
            f"call destroy_process_group() after engine.destroy() ({error})"
        ) from error
    except RuntimeError as error:
        raise WorldError(
            f"rank {peers.rank} of {peers.world_size} was about to {what}; another rank has ended, or did not come "
            f"within {peers.timeout_s:g} s (INFINITY_TIMEOUT_S): {error}"
        ) from error


def _were_destroyed(peers: Peers) -> bool:
    """Whether torch knows the process groups no more."""
    try:
        return peers.root < 0
    except ValueError:
        return True
