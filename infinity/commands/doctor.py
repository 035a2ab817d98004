"""What this machine offers for training out of core: each "no" with its remedy.

Findings are gathered first and shown after, as a table or as JSON.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import resource
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import Enum
from pathlib import Path

from infinity.deepspeed.delivery import find, scripts_path
from io_daemon.disk.kernel_text import read_text
from io_daemon.errors import ConfigError
from io_daemon.machine.buffers import open_buffers
from io_daemon.machine.facts import MachineFacts, cached_loops_below, describe_directory, describe_machine
from io_daemon.shared.metrics import size_text
from io_daemon.shared.protocol import HUGE_PAGE_BYTES

TORCH_VERSION_MIN = (2, 9)
GIB = 1 << 30
FREE_BYTES_WARNED = 10 * GIB
MEMLOCK_BYTES_WARNED = 1 * GIB
FILES_MIN = 64
"""Below, a daemon or a rank of some size opens no more."""
COLLAPSE_KERNEL_MIN = (6, 1)
"""From here on huge pages are asked for (MADV_COLLAPSE), whatever the setting below says."""
SHMEM_ENABLED = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")


class Verdict(Enum):
    OK = "ok"
    ABSENT = "absent"
    """Not here; training works without."""
    FAILED = "failed"
    """Training out of core does not work like this."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One line of the report. ``value``: what was found, for people; ``remedy``: empty for OK."""

    subject: str
    verdict: Verdict
    value: str
    remedy: str = ""


def examine(directories: Sequence[str]) -> list[Finding]:
    """Every finding. ``directories``: where swap files would go."""
    facts = describe_machine([])
    findings = [*_software(facts), *_engines(facts), *_limits(facts), *_memory(facts), *_devices(facts)]
    for directory in directories:
        findings += _directory(directory)
    return findings


def doctor(directories: Sequence[str], *, as_json: bool) -> int:
    """Print the report; 0 if nothing failed, else 1."""
    findings = examine(directories)
    if as_json:
        rows = [{**asdict(finding), "verdict": finding.verdict.value} for finding in findings]
        print(json.dumps({"ok": not _failed(findings), "findings": rows}, indent=2))
    else:
        _show(findings)
    return 1 if _failed(findings) else 0


def _failed(findings: Sequence[Finding]) -> list[Finding]:
    return [finding for finding in findings if finding.verdict is Verdict.FAILED]


def _show(findings: Sequence[Finding]) -> None:
    from rich.table import Table
    from rich.text import Text

    from io_daemon.command.console import open_console

    colours = {Verdict.OK: "green", Verdict.ABSENT: "yellow", Verdict.FAILED: "red"}
    table = Table(title="infinity doctor", show_lines=False)
    for heading in ("subject", "", "found", "remedy"):
        table.add_column(heading, overflow="fold")
    for finding in findings:
        colour = colours[finding.verdict]
        table.add_row(finding.subject, Text(finding.verdict.value, style=colour), finding.value, finding.remedy)
    console = open_console()
    console.print(table)
    failed = _failed(findings)
    console.print(
        f"{len(failed)} of {len(findings)} findings keep training out of core from working"
        if failed
        else "training out of core works on this machine"
    )


def _ok(subject: str, value: str) -> Finding:
    return Finding(subject=subject, verdict=Verdict.OK, value=value)


def _absent(subject: str, value: str, remedy: str) -> Finding:
    return Finding(subject=subject, verdict=Verdict.ABSENT, value=value, remedy=remedy)


def _fail(subject: str, value: str, remedy: str) -> Finding:
    return Finding(subject=subject, verdict=Verdict.FAILED, value=value, remedy=remedy)


def _software(facts: MachineFacts) -> list[Finding]:
    findings = [_ok("python", facts.python), _ok("kernel", facts.kernel or "unknown")]
    if (problem := _torch_problem()) is not None:
        return [*findings, _fail("torch", problem, "pip install 'torch>=2.9'")]
    import torch

    return [*findings, _ok("torch", torch.__version__), _deepspeed()]


def _deepspeed() -> Finding:
    """What ``import deepspeed`` gives a script that is started like this command."""
    subject, remedy = "import deepspeed", "nothing; `infinity as-deepspeed COMMAND` gives infinity under its names"
    found = find(scripts_path())
    if found is None:
        return _absent(subject, "nothing of that name", remedy)
    if found.ours:
        return _ok(subject, f"infinity, as DeepSpeed {found.version}: {found.file}")
    return _absent(subject, f"DeepSpeed {found.version or 'without metadata'}: {found.file}", remedy)


def _torch_problem() -> str | None:
    if importlib.util.find_spec("torch") is None:
        return "not installed"
    import torch

    major, minor = torch.__version__.split(".")[:2]
    return torch.__version__ if (int(major), int(minor)) < TORCH_VERSION_MIN else None


def _engines(facts: MachineFacts) -> list[Finding]:
    if not facts.engines:
        return [_fail("I/O core", "cannot be loaded", "; ".join(facts.notes))]
    headers = {"io_uring": "liburing-dev", "libaio": "libaio-dev"}
    findings = []
    for engine in facts.engines:
        subject = f"engine {engine.name}"
        if engine.reason is None:
            findings.append(_ok(subject, "works"))
        elif not engine.compiled:
            package = headers.get(engine.name, "")
            findings.append(_absent(subject, engine.reason, f"apt-get install {package}, then make build"))
        elif engine.name == "posix":
            findings.append(_fail(subject, engine.reason, "it needs only threads: look at ulimit -u"))
        else:
            findings.append(_absent(subject, engine.reason, _engine_remedy(engine.name, facts)))
    return findings


def _engine_remedy(engine: str, facts: MachineFacts) -> str:
    if engine == "io_uring":
        if facts.io_uring_disabled:
            return "sysctl kernel.io_uring_disabled=0; until then the next engine is used"
        return "allow the io_uring system calls in the container's seccomp profile; until then the next engine is used"
    return "raise fs.aio-max-nr; until then the next engine is used"


def _limits(facts: MachineFacts) -> list[Finding]:
    locked = facts.memlock_bytes
    if locked == "unlimited":
        memlock = _ok("memlock limit", "unlimited")
    elif locked >= MEMLOCK_BYTES_WARNED:
        memlock = _ok("memlock limit", f"{size_text(locked)}; a larger arena stays unlocked")
    else:
        memlock = _absent(
            "memlock limit",
            f"{size_text(locked)}: arenas stay unlocked, and pin_memory: true is refused",
            "ulimit -l unlimited, or LimitMEMLOCK=infinity in the unit",
        )
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    open_files = _ok("open files limit", str(files))
    if files < FILES_MIN:
        open_files = _fail("open files limit", f"{files}: training is refused", "ulimit -n 65536")
    elif files < 1024:
        open_files = _absent("open files limit", str(files), "ulimit -n 65536")
    findings = [memlock, open_files]
    if facts.aio_max_nr is not None:
        used = facts.aio_nr or 0
        value = f"{used} of {facts.aio_max_nr} in use"
        findings.append(
            _ok("aio-max-nr", value)
            if facts.aio_max_nr - used >= 4096
            else _absent("aio-max-nr", value, "sysctl fs.aio-max-nr=1048576 (only libaio needs it)")
        )
    return findings


def _memory(facts: MachineFacts) -> list[Finding]:
    available, total = facts.ram_available_bytes or 0, facts.ram_bytes or 0
    findings = [_ok("memory", f"{size_text(available)} of {size_text(total)} available")]
    if facts.cgroup_ram_max_bytes is not None:
        findings.append(_ok("memory of this cgroup", size_text(facts.cgroup_ram_max_bytes)))
    findings.append(_huge_pages(facts.kernel or ""))
    return findings


def _huge_pages(kernel: str) -> Finding:
    name, until_then = "huge pages for arenas", "until then pages of 4 KiB are used"
    try:
        with open_buffers(HUGE_PAGE_BYTES) as buffers:
            if buffers.has_huge_pages:
                return _ok(name, "given when asked for")
    except OSError as error:
        return _fail(name, f"not even one: {error.strerror}", "free some memory, or raise the limit of this cgroup")
    allowed = read_text(SHMEM_ENABLED)
    if allowed is None:
        return _absent(name, "not in this kernel", f"one with CONFIG_TRANSPARENT_HUGEPAGE; {until_then}")
    chosen = allowed.partition("[")[2].partition("]")[0] or allowed
    version = re.match(r"(\d+)\.(\d+)", kernel)
    if version is not None and tuple(map(int, version.groups())) >= COLLAPSE_KERNEL_MIN:
        remedy = f"echo 1 > /proc/sys/vm/compact_memory; {until_then}"
        return _absent(name, "refused when asked for: free memory is in pieces", remedy)
    if chosen in ("always", "within_size", "advise", "force"):
        return _ok(name, f"transparent, {chosen}")
    return _absent(
        name,
        f"transparent: {chosen}; this kernel cannot be asked for them, as Linux 6.1 can",
        f"echo advise > {SHMEM_ENABLED}; {until_then}",
    )


def _devices(facts: MachineFacts) -> list[Finding]:
    findings = [
        _ok("cores", f"{facts.num_cores} of {facts.num_cores_online}"),
        _ok("NUMA nodes", facts.numa_nodes or "one"),
    ]
    accelerator = None
    if _torch_problem() is None:
        import torch

        accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if accelerator is None:
        findings.append(_absent("accelerator", "none", "training runs on the CPU"))
    else:
        findings.append(_ok("accelerator", f"{torch.accelerator.device_count()} x {accelerator.type}"))
    findings.append(_kvikio(accelerator is not None))
    return findings


def _kvikio(has_gpu: bool) -> Finding:
    subject = "GPUDirect Storage"
    if importlib.util.find_spec("kvikio") is None:
        return _absent(subject, "kvikio is not installed", "pip install kvikio-cu13 (only a GPU machine gains)")
    if not has_gpu:
        return _absent(subject, "kvikio is installed, but there is no GPU", "nothing: transfers go through the host")
    if not os.path.exists("/proc/driver/nvidia-fs/stats"):
        return _absent(subject, "nvidia-fs is not loaded", "modprobe nvidia-fs; kvikio works without, through the host")
    return _ok(subject, "kvikio and nvidia-fs")


def _directory(text: str) -> list[Finding]:
    try:
        from io_daemon.disk.swap_dir import THIN_FILESYSTEMS, check_swap_dir, probe_direct
    except ImportError:
        return [_fail(text, "cannot be examined without the I/O core", "build it: make build, or pip install .")]
    path = Path(text)
    try:
        swap_dir = check_swap_dir(path)
    except ConfigError as error:
        return [_fail(text, "cannot hold swap files", error.remedy)]
    findings = []
    filesystem = swap_dir.filesystem
    if swap_dir.in_memory:
        findings.append(
            _fail(f"{text}: filesystem", f"{filesystem} lies in memory: swapping to it saves none", "name a disk")
        )
    elif filesystem in THIN_FILESYSTEMS:
        findings.append(
            _absent(
                f"{text}: filesystem",
                f"{filesystem}: reserving space guarantees nothing",
                "use ext4 or xfs, or keep free space",
            )
        )
    else:
        findings.append(_ok(f"{text}: filesystem", f"{filesystem}; reserved space is there when it is written"))
    if swap_dir.direct:
        findings.append(_ok(f"{text}: O_DIRECT", "works"))
    else:
        findings.append(
            _absent(
                f"{text}: O_DIRECT",
                f"{probe_direct(path)}: I/O goes through the page cache",
                "use ext4 or xfs on a local disk",
            )
        )
    findings.append(_block_device(text))
    findings += [_cached_loop(text, name) for name in cached_loops_below(path)]
    free = swap_dir.free_bytes()
    findings.append(
        _ok(f"{text}: free space", f"{size_text(free)}, {free // 18 / 1e6:,.0f} M parameters at 18 bytes")
        if free >= FREE_BYTES_WARNED
        else _absent(f"{text}: free space", size_text(free), "free some: a parameter takes up to 18 bytes")
    )
    return findings


def _block_device(text: str) -> Finding:
    """Logical block size and kind of the device below, where the filesystem tells its device."""
    device = describe_directory(Path(text)).device
    if device is None:
        return _absent(f"{text}: block device", "not told by this filesystem", "nothing: I/O is aligned to 4096 bytes")
    logical_bytes = device.logical_block_bytes or 512
    kind = "rotating" if device.rotational else "not rotating"
    value = f"{device.name}: logical blocks of {logical_bytes} bytes, {kind}"
    if logical_bytes > 4096:
        return _fail(f"{text}: block device", value, "I/O is aligned to 4096 bytes: name a directory on another disk")
    return _ok(f"{text}: block device", value)


def _cached_loop(text: str, name: str) -> Finding:
    value = "reads and writes its file through the page cache, with O_DIRECT or without"
    return _absent(f"{text}: loop device {name}", value, f"losetup --direct-io=on /dev/{name}")
