"""A system call that this process may not make, as in a container or on another filesystem."""

from __future__ import annotations

import ctypes
import struct
from typing import Final

NR_MADVISE: Final = 28
NR_SENDTO: Final = 44
NR_RECVFROM: Final = 45
NR_FALLOCATE: Final = 285
NR_IO_URING_SETUP: Final = 425
"""Of x86-64."""

PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP, MODE_FILTER = 38, 22, 2
RET_ALLOW, RET_ERRNO = 0x7FFF0000, 0x00050000


def forbid(number: int, error_number: int) -> None:
    """From now on, in this process, the system call ends with that errno."""
    code = b"".join(
        [
            struct.pack("HBBI", 0x20, 0, 0, 0),  # load the system call's number
            struct.pack("HBBI", 0x15, 0, 1, number),  # equal?
            struct.pack("HBBI", 0x06, 0, 0, RET_ERRNO | error_number),
            struct.pack("HBBI", 0x06, 0, 0, RET_ALLOW),
        ]
    )
    buffer = ctypes.create_string_buffer(code)
    program = struct.pack("HxxxxxxP", len(code) // 8, ctypes.addressof(buffer))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0 or libc.prctl(PR_SET_SECCOMP, MODE_FILTER, program) != 0:
        raise OSError(ctypes.get_errno(), "prctl")
