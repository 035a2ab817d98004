"""``aio``, and our own section ``io_daemon``."""

from __future__ import annotations

from typing import get_args

from infinity.config.keys.key import Key, refused, subsumed, works
from io_daemon.config import EngineChoice

_ONE_THREAD = "one I/O thread holds the whole queue depth"

AIO: tuple[Key, ...] = (
    works("aio.block_size", "the same as io_daemon.block_size"),
    works("aio.queue_depth", "the same as io_daemon.queue_depth"),
    *(subsumed(f"aio.{name}", "whole number", _ONE_THREAD) for name in ("intra_op_parallelism", "thread_count")),
    subsumed("aio.single_submit", "boolean", "requests are submitted in batches"),
    subsumed("aio.overlap_events", "boolean", "completions are reaped while others are submitted"),
    refused("aio.use_gds", "GPUDirect Storage is not built yet", "write false", accepts=(False,)),
)

IO_DAEMON: tuple[Key, ...] = (
    works("io_daemon.socket", '"auto" ($INFINITY_IO_SOCKET, then the per-user socket) or a path', auto="value"),
    works("io_daemon.host_budget_bytes", "bound on the arenas of all ranks of the job on the node"),
    works("io_daemon.swap_dirs", "directories of swap files, besides nvme_path"),
    works(
        "io_daemon.engine",
        " or ".join(f'"{choice}"' for choice in get_args(EngineChoice)) + "; a running daemon keeps its own",
        auto="value",
    ),
    works(
        "io_daemon.block_size",
        'bytes per I/O and checksum, a multiple of 4096, or "auto": what `io-daemon bench` found best on this machine; '
        "a running daemon keeps its own",
        auto="value",
    ),
    works(
        "io_daemon.queue_depth",
        'I/Os in flight per engine, or "auto": as block_size; a running daemon keeps its own',
        auto="value",
    ),
    refused(
        "io_daemon.commit_every_n_steps",
        "durable commits are not built yet: a job that dies goes on from its last checkpoint",
        "write 0",
        accepts=(0,),
    ),
    works(
        "io_daemon.update_in_backward",
        "true: a chunk is updated as soon as its gradients are final, while backward goes on, and they never reach the "
        "store. At stage 3, without clipping, fp16, norms, optimizers of whole parameters and of your own; nobody "
        "sees weights or states between backward() and step(). The bits are the same",
    ),
    works(
        "io_daemon.update",
        '"on_use": a chunk is updated when its weights are next used, so that reading its state ahead and writing it '
        'behind go on during forward; "in_step": before step() returns, as by an optimizer of your own always. The '
        "bits are the same",
    ),
    works(
        "io_daemon.master_weights",
        '"split": the store has an fp32 master weight as its bf16 weight and 16 bits, and one bit in the sign of the '
        "optimizer's second moment: 2 bytes a parameter less are kept, read and written. With bf16 at stage 3, and "
        'optimizers that have an fp32 state that is never negative (the Adams, Adagrad, RMSprop). "fp32": whole. The '
        "bits are the same",
    ),
    works(
        "io_daemon.activation_checkpoints",
        "true: inputs of infinity.checkpointing.checkpoint wait for backward in swap files, written behind forward and "
        "read ahead of backward; those of less than a page, or that do not lie densely, in memory. An eighth of "
        "host_budget_bytes, 64 MiB a rank at most, is theirs. The bits are the same",
    ),
    works(
        "io_daemon.moments",
        '"bf16" or "8bit": the store has the optimizer\'s fp32 states rounded, to 2 bytes or 1 (in blocks of 64); this '
        "changes the bits of the result; states that are never negative (second moments) are rounded up by chance, so "
        'that they go on moving. The same bits at every tier and budget. "8bit" not together with master_weights '
        '"split". "fp32": as they are',
    ),
    works("io_daemon.verify_checksums", "check every block that is read back; a running daemon keeps its own"),
    works("io_daemon.start", '"auto": start a private daemon where none is reachable; "never"', auto="value"),
)

TABLES = (AIO, IO_DAEMON)
