from __future__ import annotations

import errno
import gc
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from io_daemon._native import Region
from tests.conftest import MountTmpfs
from tests.support.reactor import make_region

PAGE_BYTES = 4096


HUGE_PAGE_BYTES = 2 << 20


def mapping_field(address: int, name: str) -> str:
    """What smaps says of the mapping that starts at ``address``."""
    text = Path("/proc/self/smaps").read_text()
    found = re.search(rf"{name}:(.*)", text[text.index(f"{address:x}-") :])
    if found is None:
        raise AssertionError(f"smaps has no {name}")
    return found[1]


def mapping_flags(address: int) -> set[str]:
    return set(mapping_field(address, "VmFlags").split())


def huge_bytes_mapped(region: Region) -> int:
    return int(mapping_field(region.address, "ShmemPmdMapped").split()[0]) * 1024


def test_two_regions_of_one_memfd_share_their_bytes() -> None:
    fd = os.memfd_create("shared")
    os.truncate(fd, PAGE_BYTES)
    writer, reader = Region(fd, PAGE_BYTES), Region(fd, PAGE_BYTES, writable=False)
    os.close(fd)
    writer.array()[100] = 7
    assert reader.array()[100] == 7
    assert (reader.region_bytes, reader.writable, writer.writable) == (PAGE_BYTES, False, True)
    assert writer.address == writer.array().ctypes.data


def test_array_of_a_read_only_region_cannot_be_written() -> None:
    array = make_region(PAGE_BYTES, writable=False).array()
    assert not array.flags.writeable
    with pytest.raises(ValueError, match="read-only"):
        array[0] = 1


def test_array_keeps_the_mapping() -> None:
    array = make_region(PAGE_BYTES).array()
    gc.collect()
    array[:] = 3
    assert int(array.sum()) == 3 * PAGE_BYTES


def test_region_larger_than_its_file_is_refused() -> None:
    fd = os.memfd_create("small")
    os.truncate(fd, PAGE_BYTES)
    with pytest.raises(OSError, match=f"{PAGE_BYTES} bytes") as caught:
        Region(fd, PAGE_BYTES + 1)
    os.close(fd)
    assert caught.value.errno == errno.EINVAL


def test_bad_descriptors_and_sizes() -> None:
    with pytest.raises(OSError) as caught:
        Region(-1, PAGE_BYTES)
    assert caught.value.errno == errno.EBADF
    with pytest.raises(ValueError, match="at least one byte"):
        Region(0, 0)
    with pytest.raises(ValueError, match="negative"):
        Region(0, -1)


@pytest.mark.parametrize("num_threads", [1, 3, 64])
def test_prefault_allocates_every_page(num_threads: int) -> None:
    num_bytes = 10 * PAGE_BYTES + 1
    fd = os.memfd_create("prefault")
    os.truncate(fd, num_bytes)
    region = Region(fd, num_bytes)
    region.array()[::PAGE_BYTES] = 9
    region.prefault(num_threads)
    assert os.fstat(fd).st_blocks * 512 == 11 * PAGE_BYTES
    os.close(fd)
    assert (region.array()[::PAGE_BYTES] == 9).all()


def test_prefault_of_what_the_filesystem_has_no_room_for_is_an_error(mount_tmpfs: MountTmpfs) -> None:
    """And no SIGBUS, which is what touching such a page would be."""
    path = mount_tmpfs(1 << 20) / "file"
    path.touch()
    os.truncate(path, 4 << 20)
    fd = os.open(path, os.O_RDWR)
    region = Region(fd, 4 << 20)
    os.close(fd)
    with pytest.raises(OSError, match="prefault"):
        region.prefault(2)


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="the filter names x86-64 system calls")
@pytest.mark.parametrize("writable", [False, True])
@pytest.mark.parametrize("num_bytes", [10 * PAGE_BYTES + 1, HUGE_PAGE_BYTES])
def test_prefault_before_linux_5_14_touches_every_page(num_bytes: int, writable: bool) -> None:
    """madvise knows no MADV_POPULATE there; contents stay. Behind a region as large as a huge page nothing is mapped:
    a touch beyond it would be a SIGSEGV."""
    script = """
import errno, os, sys
from io_daemon._native import Region
from tests.support.seccomp import NR_MADVISE, forbid
num_bytes = int(sys.argv[2])
fd = os.memfd_create("prefault")
os.truncate(fd, num_bytes)
os.pwrite(fd, b"kept", 4094)
region = Region(fd, num_bytes, writable=sys.argv[1] == "True")
forbid(NR_MADVISE, errno.EINVAL)
assert region.prefault(3) == 0
assert os.fstat(fd).st_blocks * 512 == -(-num_bytes // 4096) * 4096
assert os.pread(fd, num_bytes, 0) == bytes(4094) + b"kept" + bytes(num_bytes - 4098)
"""
    command = [sys.executable, "-c", script, str(writable), str(num_bytes)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (run.returncode, run.stderr) == (0, "")


def test_huge_pages_are_those_that_prefault_reports() -> None:
    """How many there are is the machine's affair; contents and the odd end are not."""
    num_bytes = 3 * HUGE_PAGE_BYTES + 5 * PAGE_BYTES
    fd = os.memfd_create("huge")
    os.truncate(fd, num_bytes)
    region = Region(fd, num_bytes)
    region.array()[::PAGE_BYTES] = 9
    huge_bytes = region.prefault(2)
    assert huge_bytes <= 3 * HUGE_PAGE_BYTES
    assert huge_bytes_mapped(region) >= huge_bytes
    assert os.fstat(fd).st_blocks * 512 >= num_bytes
    other = Region(fd, num_bytes, writable=False)  # as the daemon maps a rank's arena
    os.close(fd)
    assert other.address % HUGE_PAGE_BYTES == 0
    assert (other.array()[::PAGE_BYTES] == 9).all()


@pytest.mark.parametrize("num_threads", [1, 2, 5])
@pytest.mark.parametrize("num_pages", [1, 2, 16, 17, 33])
def test_where_the_machine_has_huge_pages_a_region_of_nothing_else_is_all_of_them(
    num_pages: int, num_threads: int
) -> None:
    """Behind its end nothing is mapped, and a part is as long as sixteen of them."""
    if make_region(HUGE_PAGE_BYTES + PAGE_BYTES).prefault(1) == 0:
        pytest.skip("the kernel has no huge pages to give")
    region = make_region(num_pages * HUGE_PAGE_BYTES)
    assert region.prefault(num_threads) == num_pages * HUGE_PAGE_BYTES
    assert huge_bytes_mapped(region) == num_pages * HUGE_PAGE_BYTES
    beside = make_region(num_pages * HUGE_PAGE_BYTES + 5 * PAGE_BYTES)
    assert beside.prefault(num_threads) == num_pages * HUGE_PAGE_BYTES


def test_of_a_region_that_is_only_read_no_page_becomes_huge() -> None:
    region = make_region(2 * HUGE_PAGE_BYTES, writable=False)
    assert region.prefault(1) == 0
    assert huge_bytes_mapped(region) == 0


@pytest.mark.parametrize("num_bytes", [HUGE_PAGE_BYTES, HUGE_PAGE_BYTES + 1, 5 * HUGE_PAGE_BYTES - PAGE_BYTES])
def test_a_large_region_begins_where_a_huge_page_can(num_bytes: int) -> None:
    def reserved() -> set[str]:
        return {line.split()[0] for line in Path("/proc/self/maps").read_text().splitlines() if " ---p " in line}

    before = reserved()
    region = make_region(num_bytes)
    assert region.address % HUGE_PAGE_BYTES == 0
    assert reserved() <= before  # what was reserved to align it is given back
    region.array()[num_bytes - 1] = 1


def test_dont_fork_reaches_the_kernel() -> None:
    region = make_region(PAGE_BYTES)
    assert "dc" not in mapping_flags(region.address)
    region.dont_fork()
    assert "dc" in mapping_flags(region.address)


def test_a_child_without_the_mapping_leaves_alone_what_has_come_in_its_place() -> None:
    script = """
import ctypes, mmap, os
from io_daemon._native import Region

MAP_FIXED_NOREPLACE = 0x100000
num_bytes = 4096
fd = os.memfd_create("region")
os.ftruncate(fd, num_bytes)
region = Region(fd, num_bytes)
address = region.address
region.dont_fork()
child = os.fork()
if child:
    del region
    assert os.waitpid(child, 0)[1] == 0
else:
    libc = ctypes.CDLL(None)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_FIXED_NOREPLACE
    assert libc.mmap(address, num_bytes, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0) == address
    del region
    with open("/proc/self/maps") as maps:
        ranges = [[int(end, 16) for end in line.split()[0].split("-")] for line in maps]
    os._exit(not any(begin <= address < end for begin, end in ranges))
"""
    subprocess.run([sys.executable, "-c", script], check=True)


def test_lock_reaches_the_kernel() -> None:
    region = make_region(PAGE_BYTES)
    region.lock()
    assert "lo" in mapping_flags(region.address)


def test_lock_beyond_the_limit_is_an_oserror() -> None:
    script = """
import os, resource, sys
from tests.conftest import MountTmpfs
from tests.support.reactor import make_region
region = make_region(1 << 20)
resource.setrlimit(resource.RLIMIT_MEMLOCK, (4096, 4096))
if os.getuid() == 0:
    os.setuid(65534)
try:
    region.lock()
except OSError as error:
    sys.exit(f"errno {error.errno}")
"""
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert run.stderr.strip() in {f"errno {errno.ENOMEM}", f"errno {errno.EPERM}"}


def test_zero_clears_exactly_its_bytes() -> None:
    region = make_region(PAGE_BYTES)
    region.array()[:] = 1
    region.zero(10, 20)
    assert np.flatnonzero(region.array() == 0).tolist() == list(range(10, 30))


@pytest.mark.parametrize(
    ("offset", "num_bytes"), [(1, PAGE_BYTES), (PAGE_BYTES + 1, 0), (-1, 1), (0, -1), (2**62, 2**62)]
)
def test_zero_outside_the_region_is_refused(offset: int, num_bytes: int) -> None:
    region = make_region(PAGE_BYTES)
    with pytest.raises(ValueError):
        region.zero(offset, num_bytes)


def test_zero_of_a_read_only_region_is_refused() -> None:
    with pytest.raises(ValueError, match="read-only"):
        make_region(PAGE_BYTES, writable=False).zero(0, 1)
