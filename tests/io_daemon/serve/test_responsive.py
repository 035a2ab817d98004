"""What one tenant asks of the daemon, however much it is, does not hold the loop that serves the others.

The measure is CPU time between two turns of the loop: of its own thread, and of the others (which may have the
interpreter meanwhile) beyond the time in which the loop's thread waited for a processor. What a busy machine does to
wall-clock times does not enter."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.in_process import while_serving

GAP_MS_MAX = 20
NUM_CHUNKS, NUM_ACCESSES = 60_000, 1_000_000
RANK = """
import sys
from io_daemon.rank.client import Client
from io_daemon.shared.protocol import Access, ChunkSpec
socket_path, num_chunks, num_accesses = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
spec = ChunkSpec((4096, 4096, 4096))
accesses = [Access(index % num_chunks, 7, 0, 0) for index in range(num_accesses)]
def step(name):
    print(name, flush=True)
    sys.stdin.readline()
client = Client.connect(socket_path, job="large", rank=0)
client.attach(
    num_frames=64, frame_bytes=4096, swap_dirs=client.swap_dirs, lock_memory="off", chunks_max=num_chunks
)
step("attach")
client.register([spec] * num_chunks)
step("register")
try:
    client.register([ChunkSpec((4096,))] * num_chunks)
except ValueError:
    step("refused register")
client.upload_trace(1, accesses)
step("upload trace")
while client.stats().num_plans < 1:
    client.echo()
step("plan")
client.mark(1)
client.echo()
seq = client.acquire(0, read=1)
client.wait(seq)
client.release(seq)
client.echo()
step("adopt")
client.unregister(range(0, num_chunks // 2))
step("unregister")
client.close()
step("close")
"""


PHASES = ["attach", "register", "refused register", "upload trace", "plan", "adopt", "unregister", "close"]
TRIES = 3
"""Other work on the machine can only lengthen a gap: the least of a few says what the code does."""


def times_s() -> tuple[float, float, float]:
    """CPU seconds of the calling thread, of all others, and seconds in which it waited for a processor."""
    own_s = time.thread_time()
    waited_ns = int(Path("/proc/thread-self/schedstat").read_text().split()[1])
    return own_s, time.process_time() - own_s, waited_ns / 1e9


def held_s(before: tuple[float, float, float], now: tuple[float, float, float]) -> float:
    own_s, others_s, waited_s = (after - earlier for earlier, after in zip(before, now, strict=True))
    return own_s + max(0.0, others_s - waited_s)


def largest_gaps_ms(monkeypatch: pytest.MonkeyPatch, swap_dir: Path) -> dict[str, float]:
    """By phase of RANK."""
    gaps_ms: dict[str, float] = {}
    worst_ms = 0.0

    async def tick() -> None:
        nonlocal worst_ms
        before = times_s()
        while True:
            await asyncio.sleep(0.0005)
            now = times_s()
            worst_ms, before = max(worst_ms, 1e3 * held_s(before, now)), now

    def use(socket_path: str) -> None:
        nonlocal worst_ms
        asyncio.run_coroutine_threadsafe(tick(), loops[0])
        command = [sys.executable, "-c", RANK, socket_path, str(NUM_CHUNKS), str(NUM_ACCESSES)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as rank:
            assert rank.stdin is not None
            assert rank.stdout is not None
            for name in rank.stdout:
                gaps_ms[name.strip()], worst_ms = worst_ms, 0.0
                rank.stdin.write("\n")
                rank.stdin.flush()
        assert rank.returncode == 0

    loops: list[asyncio.AbstractEventLoop] = []
    while_serving(monkeypatch, [swap_dir], use, loops=loops)
    return gaps_ms


def test_no_request_however_large_holds_the_loop(monkeypatch: pytest.MonkeyPatch, swap_dir: Path) -> None:
    least_ms = dict.fromkeys(PHASES, float("inf"))
    for _ in range(TRIES):
        gaps_ms = largest_gaps_ms(monkeypatch, swap_dir)
        print({name: round(ms, 1) for name, ms in gaps_ms.items()})
        assert list(gaps_ms) == PHASES
        least_ms = {name: min(least_ms[name], gaps_ms[name]) for name in PHASES}
        if max(least_ms.values()) <= GAP_MS_MAX:
            break
    assert max(least_ms.values()) <= GAP_MS_MAX, least_ms
