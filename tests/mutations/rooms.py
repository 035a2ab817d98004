"""What can be mutated, and which tests lie near each file: quickest first, since the first failure ends a run.

A room is a directory: every file in it is mutated. Files that are not named here are judged by the room's usual tests.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[2]

P: Final = "tests/io_daemon/policy/"
C: Final = "tests/csrc/"
S: Final = "tests/io_daemon/shared/"
T: Final = "tests/infinity/"
U: Final = "tests/infinity/update/"
W: Final = "tests/infinity/weights/"
ODD: Final = "tests/odd/"


@dataclass(frozen=True)
class Room:
    directory: str
    suffixes: tuple[str, ...]
    usual: Sequence[str]
    """Test files for whatever ``nearest`` does not name."""
    nearest: Mapping[str, Sequence[str]]
    """Name of a source → the test files near it."""
    warm: Sequence[str]
    """Modules that every run needs, imported once before it forks. Never one that is mutated."""
    compiled: bool = False

    def paths(self, tree: Path = ROOT) -> tuple[str, ...]:
        """Every source of the room."""
        found = (path for path in (tree / self.directory).iterdir() if path.suffix in self.suffixes)
        return tuple(sorted(str(path.relative_to(tree)) for path in found))

    def tests(self, path: str) -> Sequence[str]:
        return self.nearest.get(Path(path).name, self.usual)


SCHEDULING: Final = [
    P + "test_scheduler.py",
    P + "test_choices.py",
    P + "test_scheduler_model.py",
    P + "test_simulation.py",
]
POLICY: Final = Room(
    directory="io_daemon/policy",
    suffixes=(".py",),
    usual=SCHEDULING,
    nearest={
        "catalog.py": [P + "test_catalog.py", *SCHEDULING],
        "cursor.py": [P + "test_cursor.py", P + "test_residency.py", *SCHEDULING],
        "eviction.py": [P + "test_eviction.py", P + "test_residency.py", *SCHEDULING],
        "extent_tree.py": [P + "test_extents.py"],
        "extents.py": [P + "test_extents.py"],
        "fair_queue.py": [P + "test_fair_queue.py"],
        "residency.py": [P + "test_plan_room.py", P + "test_residency.py", P + "test_simulation.py"],
        "step_trace.py": [P + "test_step_trace_figures.py", P + "test_step_trace.py"],
        "swap_object.py": [
            P + "test_swap_object.py",
            SCHEDULING[1],
            P + "test_residency.py",
            *SCHEDULING[:1],
            *SCHEDULING[2:],
        ],
        "trace.py": [P + "test_trace.py", *SCHEDULING],
        "window.py": [P + "test_window.py"],
    },
    warm=("numpy", "hypothesis", "hypothesis.stateful", "pydantic", "io_daemon._native"),
)

ENGINES: Final = [C + "test_engines.py", C + "test_kernel_calls.py", C + "test_reactor.py"]
REACTOR: Final = [C + "test_reactor.py", C + "test_engines.py", C + "test_blocks.py"]
RINGS: Final = [C + "test_ring.py"]
LAYOUT: Final = [S + "test_wire.py", S + "test_table.py", S + "test_arena.py", *RINGS]
CSRC: Final = Room(
    directory="csrc",
    suffixes=(".cpp", ".hpp"),
    usual=[*REACTOR, *RINGS, C + "test_region.py"],
    nearest={
        "active_request.cpp": [C + "test_blocks.py", *REACTOR[:2]],
        "active_request.hpp": [C + "test_blocks.py", *REACTOR[:2]],
        "atomics.hpp": [*RINGS, *REACTOR],
        "bindings.cpp": [
            *(S + "test_wire.py", C + "test_narrow.py", C + "test_halves.py", C + "test_squares.py"),
            *(C + "test_checksum.py", *REACTOR[:1], *RINGS, C + "test_region.py", *REACTOR[1:]),
        ],
        "bench_reactor.cpp": [C + "test_blocks.py"],
        "bench_reactor.hpp": [C + "test_blocks.py"],
        "checksum.cpp": [C + "test_checksum.py"],
        "checksum.hpp": [C + "test_checksum.py"],
        "descriptor.cpp": [*RINGS, *REACTOR],
        "descriptor.hpp": [*RINGS, *REACTOR],
        "engine.cpp": [*REACTOR[:2], C + "test_kernel_calls.py"],
        "engine.hpp": ENGINES,
        "file_space.cpp": ["tests/io_daemon/disk/test_swap_file.py"],
        "file_space.hpp": ["tests/io_daemon/disk/test_swap_file.py"],
        "halves.cpp": [C + "test_halves.py"],
        "halves.hpp": [C + "test_halves.py"],
        "latency.hpp": [C + "test_blocks.py", "tests/io_daemon/bench/test_latency.py"],
        "libaio_engine.cpp": ENGINES,
        "narrow.cpp": [C + "test_narrow.py"],
        "narrow.hpp": [C + "test_narrow.py"],
        "squares.cpp": [C + "test_squares.py"],
        "squares.hpp": [C + "test_squares.py"],
        "posix_engine.cpp": ENGINES,
        "region.cpp": [C + "test_region.py"],
        "region.hpp": [C + "test_region.py"],
        "ring.cpp": RINGS,
        "ring.hpp": RINGS,
        "uring_engine.cpp": ENGINES,
        "wake_socket.cpp": RINGS,
        "wake_socket.hpp": RINGS,
        "wire.hpp": LAYOUT,
        "wire_layout.hpp": LAYOUT,
    },
    warm=("numpy", "hypothesis", "pydantic"),
    compiled=True,
)

# What torch brings along late: every fork of a judge would pay for it.
TORCH: Final = ("numpy", "hypothesis", "torch", "torch.distributed", "torch._dynamo", "torch._inductor")
PROGRAMS: Final = "tests/mutations/slot/programs.py"
"""The programs of tests/fuzz/test_fuzz.py, without a Python of their own."""
RANKS: Final = [T + "test_ranks.py", T + "test_diverging_ranks.py"]
TRAINING: Final = [PROGRAMS, T + "test_odd_uses.py", T + "test_training_loop.py"]
UPDATE: Final = Room(
    directory="infinity/update",
    suffixes=(".py",),
    usual=[U + "test_rules.py", U + "test_sub_group.py", U + "test_optimizer.py", *TRAINING],
    nearest={
        "algorithms.py": [U + "test_rules.py", U + "test_dry_run.py", *TRAINING],
        "dry_run.py": [U + "test_dry_run.py", U + "test_rules.py", *TRAINING],
        "gradients.py": [U + "test_gradients.py", *TRAINING, *RANKS],
        "norms.py": [U + "test_norms.py", U + "test_gradients.py", *TRAINING],
        "in_backward.py": [T + "test_update_in_backward.py"],
        "muon.py": [U + "test_muon.py", U + "test_rules.py", *TRAINING],
        "loss_scale.py": [
            U + "test_loss_scale.py",
            U + "test_optimizer.py",
            T + "test_torch_autocast.py",
            *TRAINING,
        ],
        "optimizer.py": [
            U + "test_optimizer.py",
            U + "test_stored_state.py",
            *TRAINING,
            T + "test_moments.py",
            T + "test_refusals.py",
            *RANKS,
        ],
        "rule.py": [U + "test_dry_run.py", U + "test_rules.py", *TRAINING, T + "test_moments.py"],
        "reducer.py": [
            U + "test_reducer.py",
            T + "test_user_gradients.py",
            T + "test_update_in_backward.py",
            *TRAINING,
            *RANKS,
        ],
        "rounding.py": [U + "test_sub_group.py", T + "test_moments.py"],
        "scratch.py": [U + "test_scratch.py", *TRAINING],
        "stand_in.py": [U + "test_stand_in.py", U + "test_dry_run.py", U + "test_rules.py", *TRAINING],
        "stored_state.py": [U + "test_stored_state.py", T + "test_odd_uses.py", ODD + "test_engines.py"],
        "torch_rule.py": [U + "test_dry_run.py", U + "test_rules.py", *TRAINING],
        "whole.py": [U + "test_whole.py", U + "test_rules.py", *TRAINING, T + "test_moments.py"],
        "schedules.py": [U + "test_schedules.py"],
        "client_schedule.py": [U + "test_client_schedule.py", T + "test_settings.py", PROGRAMS],
        "sub_group.py": [
            U + "test_sub_group.py",
            T + "test_update_in_backward.py",
            U + "test_rules.py",
            *TRAINING,
        ],
        "update.py": [
            U + "test_optimizer.py",
            T + "test_update_in_backward.py",
            T + "test_clip_grad_norm.py",
            T + "test_update_on_use.py",
            U + "test_loss_scale.py",
            *TRAINING,
        ],
    },
    warm=TORCH,
)
USES: Final = [PROGRAMS, T + "test_odd_uses.py", T + "test_refusals.py"]
WEIGHTS: Final = Room(
    directory="infinity/weights",
    suffixes=(".py",),
    usual=[*USES, T + "test_training_loop.py"],
    nearest={
        "access.py": [
            W + "test_access.py",
            W + "test_parameters_made_again.py",
            T + "test_user_gradients.py",
            *USES,
            ODD + "test_weights_elsewhere.py",
            ODD + "test_state_dicts.py",
        ],
        "admission.py": [W + "test_admission.py", PROGRAMS, T + "test_refusals.py", ODD + "test_dtypes.py"],
        "arrays.py": [
            W + "test_arrays.py",
            *USES,
            ODD + "test_memory_shared.py",
            ODD + "test_saved_activations.py",
        ],
        "autocast.py": [W + "test_cast_once.py", T + "test_torch_autocast.py", *USES, ODD + "test_dtypes.py"],
        "buffers.py": [W + "test_buffers.py", W + "test_buffer_dtypes.py", T + "test_ranks.py"],
        "dispatcher.py": [W + "test_dispatcher.py", W + "test_access.py", *USES],
        "ended.py": [W + "test_ended.py", *USES],
        "heap.py": [W + "test_heap.py", *USES],
        "holding.py": [W + "test_holding.py", *USES, ODD + "test_engines.py", ODD + "test_saved_activations.py"],
        "init_arguments.py": [W + "test_init_arguments.py", W + "test_init_context.py", *USES],
        "init_context.py": [W + "test_init_context.py", W + "test_staging.py", *USES, T + "test_training_loop.py"],
        "leaf.py": [W + "test_leaf.py", T + "test_diverging_ranks.py"],
        "live_set.py": [W + "test_live_set_rules.py", W + "test_live_set.py", *USES],
        "ds_names.py": [
            W + "test_access.py",
            W + "test_staging.py",
            W + "test_parameters_made_again.py",
            *USES,
            T + "test_state_access.py",
        ],
        "owners.py": [
            W + "test_access.py",
            W + "test_ended.py",
            T + "test_written_weights.py",
            *USES,
            ODD + "test_weights_elsewhere.py",
        ],
        "mapped_files.py": [W + "test_mapped_files.py"],
        "placeholder.py": [W + "test_dispatcher.py", W + "test_access.py", *USES],
        "promises.py": [W + "test_promises.py", T + "test_pretrained.py", *USES],
        "param.py": [W + "test_param.py", W + "test_saved_tensors.py", *USES, ODD + "test_weights_elsewhere.py"],
        "param_group.py": [
            W + "test_param_group.py",
            U + "test_reducer.py",
            *USES,
            *RANKS,
            T + "test_training_loop.py",
        ],
        "saved_tensors.py": [W + "test_saved_tensors.py", *USES, ODD + "test_saved_activations.py"],
        "sharded_model.py": [
            W + "test_sharded_model.py",
            W + "test_state_io.py",
            *USES,
            T + "test_training_loop.py",
            T + "test_ranks.py",
        ],
        "staging.py": [
            W + "test_staging.py",
            W + "test_init_context.py",
            *USES,
            T + "test_training_loop.py",
            T + "test_ranks.py",
        ],
        "state_io.py": [W + "test_state_io.py", *USES, T + "test_state_access.py"],
        "state_dicts.py": [W + "test_state_dict_hook.py", *USES, ODD + "test_state_dicts.py"],
        "streams.py": [W + "test_streams.py", *USES],
        "structure.py": [W + "test_structure.py", *USES, ODD + "test_weights_elsewhere.py"],
    },
    warm=TORCH,
)

ROOMS: Final[Mapping[str, Room]] = {"policy": POLICY, "csrc": CSRC, "update": UPDATE, "weights": WEIGHTS}
