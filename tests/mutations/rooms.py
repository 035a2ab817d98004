"""What can be mutated, and which tests lie near each file: quickest first, since the first failure ends a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

P: Final = "tests/io_daemon/policy/"
C: Final = "tests/csrc/"
T: Final = "tests/infinity/"


@dataclass(frozen=True)
class Room:
    tests: Mapping[str, Sequence[str]]
    """Path of a source → the test files near it; the paths are the room."""
    warm: Sequence[str]
    """Modules that every run needs, imported once before it forks. Never one that is mutated."""
    compiled: bool = False

    @property
    def paths(self) -> tuple[str, ...]:
        return tuple(self.tests)


SCHEDULING: Final = [
    P + "test_scheduler.py",
    P + "test_seams.py",
    P + "test_simulation.py",
    P + "test_scheduler_model.py",
]
POLICY: Final = Room(
    tests={
        "io_daemon/policy/catalog.py": SCHEDULING,
        "io_daemon/policy/counters.py": SCHEDULING,
        "io_daemon/policy/cursor.py": [P + "test_trace.py", *SCHEDULING],
        "io_daemon/policy/eviction.py": SCHEDULING,
        "io_daemon/policy/extents.py": [P + "test_extents.py", *SCHEDULING],
        "io_daemon/policy/fair_queue.py": [P + "test_fair_queue.py"],
        "io_daemon/policy/host_tier.py": SCHEDULING,
        "io_daemon/policy/leases.py": SCHEDULING,
        "io_daemon/policy/residency.py": [P + "test_residency.py", *SCHEDULING],
        "io_daemon/policy/scheduler.py": SCHEDULING,
        "io_daemon/policy/step_trace.py": [P + "test_step_trace.py"],
        "io_daemon/policy/swap_object.py": SCHEDULING,
        "io_daemon/policy/trace.py": [P + "test_trace.py", *SCHEDULING],
        "io_daemon/policy/transfers.py": SCHEDULING,
        "io_daemon/policy/window.py": [*SCHEDULING],
    },
    warm=("numpy", "hypothesis", "hypothesis.stateful", "pydantic", "io_daemon._native"),
)

ENGINES: Final = [C + "test_engines.py", C + "test_kernel_calls.py", C + "test_reactor.py"]
REACTOR: Final = [C + "test_reactor.py", C + "test_engines.py", C + "test_blocks.py"]
CSRC: Final = Room(
    tests={
        "csrc/active_request.cpp": [C + "test_blocks.py", C + "test_reactor.py", C + "test_engines.py"],
        "csrc/bench_reactor.cpp": [C + "test_blocks.py"],
        "csrc/checksum.cpp": [C + "test_checksum.py"],
        "csrc/descriptor.cpp": [C + "test_ring.py", *REACTOR],
        "csrc/engine.cpp": REACTOR,
        "csrc/file_space.cpp": ["tests/io_daemon/disk/test_swap_file.py"],
        "csrc/libaio_engine.cpp": ENGINES,
        "csrc/posix_engine.cpp": ENGINES,
        "csrc/reactor.cpp": REACTOR,
        "csrc/region.cpp": [C + "test_region.py"],
        "csrc/registry.cpp": REACTOR,
        "csrc/ring.cpp": [C + "test_ring.py"],
        "csrc/ring.hpp": [C + "test_ring.py"],
        "csrc/uring_engine.cpp": ENGINES,
    },
    warm=("numpy", "hypothesis", "pydantic"),
    compiled=True,
)

TRAINING: Final = [T + "test_training_loop.py", T + "test_parity.py"]
UPDATE: Final = Room(
    tests={
        "infinity/update/gradients.py": TRAINING,
        "infinity/update/optimizer.py": TRAINING,
        "infinity/update/reducer.py": TRAINING,
        "infinity/update/schedules.py": [T + "update/test_schedules.py"],
        "infinity/update/sub_group.py": TRAINING,
    },
    warm=("numpy", "torch", "torch.distributed", "io_daemon._native"),
)
WEIGHTS: Final = Room(
    tests={
        "infinity/weights/hooks.py": [T + "test_states.py", T + "test_odd_uses.py", *TRAINING],
        "infinity/weights/init_context.py": TRAINING,
        "infinity/weights/live_set.py": [T + "weights/test_live_set.py", *TRAINING],
        "infinity/weights/param.py": [T + "test_states.py", T + "test_odd_uses.py", *TRAINING],
        "infinity/weights/param_group.py": [T + "test_states.py", T + "test_odd_uses.py", *TRAINING],
    },
    warm=("numpy", "torch", "torch.distributed", "io_daemon._native"),
)

ROOMS: Final[Mapping[str, Room]] = {"policy": POLICY, "csrc": CSRC, "update": UPDATE, "weights": WEIGHTS}
