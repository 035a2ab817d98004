"""A directory of checkpoints: one subdirectory a tag, and ``latest``, a file that names one of them.

A checkpoint is written beside its place, is on the disk with all its names, and then takes its place by one rename;
only then does ``latest`` name it, by another. So whatever ends the writer, a tag is whole or it is not there, and the
former checkpoint of the same tag stays until the new one has its name, and what users have put beside its files stays
beside those of the new one. The writer holds a lock on the directory that it writes, whose name is nobody else's; what
a dead one left is removed by the next, and others may write other tags.
"""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from hashlib import blake2b
from pathlib import Path
from typing import Final

from infinity.checkpoint.beside import NEW_LATEST, Beside
from infinity.checkpoint.disk import disk_errors, sync_directory, write_whole
from infinity.checkpoint.manifest import MANIFEST
from infinity.errors import CheckpointError, ConfigError
from infinity.files.aside import Left, held, remove, remove_left
from infinity.files.place import bytes_of_name
from infinity.files.writers import new_writer

LATEST: Final = "latest"
ASIDE: Final = ".infinity-saving-"
REPLACED: Final = ".infinity-replaced-"
"""Names beginning so are a writer's own: what it has not finished, and what it is about to replace."""
TAG_BYTES_MAX: Final = 255 - len(ASIDE) - 9
"""Filesystems have names of 255 bytes, and a tag has more before it while it is written, or replaced."""

_AT_FDCWD: Final = -100
_RENAME_EXCHANGE: Final = 2


def check_tag(tag: object) -> str:
    """``tag`` as the name of a subdirectory, and as the one line of ``latest``. Raises ConfigError where it cannot be
    one."""
    text = str(tag)
    if not text or "/" in text or text in (LATEST, ".", "..") or text.startswith((ASIDE, REPLACED)):
        raise ConfigError("tag", tag, f"is the name of a directory: write one without slashes, other than {LATEST!r}")
    if not text.isprintable() or text != text.strip():
        raise ConfigError("tag", tag, "is a line of a file: write printable characters, and no spaces around them")
    if len(bytes_of_name("tag", text)) > TAG_BYTES_MAX:
        raise ConfigError("tag", tag, f"is the name of a directory: write one of at most {TAG_BYTES_MAX} bytes")
    return text


def latest_tag(directory: Path) -> str | None:
    """What ``latest`` names; None where there is no such file, nor a link."""
    path = directory / LATEST
    with disk_errors(path, "read"):
        try:
            text = path.read_text("utf-8", errors="replace").strip()
        except FileNotFoundError:
            if os.path.lexists(path):  # a link that leads nowhere
                raise
            return None
    try:
        return check_tag(text)
    except ConfigError as error:
        there = ", ".join(tags_of(directory)[-8:]) or "none"
        raise CheckpointError(path, f"is damaged: it holds {text[:40]!r}", f"name a tag; there are: {there}") from error


def tags_of(directory: Path) -> list[str]:
    """The checkpoints that are whole, oldest first."""
    if not directory.is_dir():
        return []
    found = [
        path
        for path in directory.glob(f"*/{MANIFEST}")
        if path.is_file() and not path.parent.name.startswith((ASIDE, REPLACED))
    ]
    return [path.parent.name for path in sorted(found, key=lambda path: path.stat().st_mtime_ns)]


def find(directory: Path, tag: str) -> Path:
    """The checkpoint's own directory. Raises CheckpointError if it is not there, with what is."""
    final = directory / tag
    with disk_errors(final, "read"):
        for path in (final, directory / f"{REPLACED}{tag}"):
            if (path / MANIFEST).is_file():
                return path
        there = ", ".join(tags_of(directory)[-8:]) or "none"
        if any(final.glob("*_optim_states.pt")):
            raise CheckpointError(
                final, "was written by DeepSpeed", "rewrite it: infinity import-deepspeed DIR OUT, and load OUT"
            )
        problem = "is no whole checkpoint: it has no manifest" if final.is_dir() else "is not there"
    raise CheckpointError(final, problem, f"checkpoints in {directory}: {there}")


def chosen(directory: Path, tag: str | None) -> Path | None:
    """The checkpoint of ``tag`` in ``directory``, by default its latest, or ``directory`` itself where it is one; None
    where nothing is called latest. Raises as ``check_tag`` and ``find``."""
    if tag is not None:
        return find(directory, check_tag(tag))
    with disk_errors(directory, "read"):
        if (directory / MANIFEST).is_file():
            return directory
    tag = latest_tag(directory)
    return None if tag is None else find(directory, tag)


@contextmanager
def written_aside(directory: Path, tag: str) -> Iterator[Path]:
    """A new directory to write into, which goes unless it was published. For one process; others may write into it."""

    def made() -> Path:
        aside = directory / f"{ASIDE}{new_writer()}-{_short(tag)}"
        aside.mkdir()
        return aside

    with ExitStack() as stack:
        with disk_errors(directory, "made"):
            directory.mkdir(parents=True, exist_ok=True)
            remove_leftovers(directory, tag)
            _refuse_foreign(directory / tag)
            aside = stack.enter_context(held(made))
        yield aside


def publish(aside: Path, directory: Path, tag: str, *, latest: bool) -> None:
    """Everything in ``aside`` is on the disk: from now on it is the checkpoint of the tag, and the one that ``latest``
    names if it shall; where one of both fails, both are what they were. What needs space is written before that.

    Entries of users' own in the former one are in it, too. Raises CheckpointError, also where it has a file of such a
    name."""
    final, replaced = directory / tag, directory / f"{REPLACED}{tag}"
    if latest:
        write_whole(aside / NEW_LATEST, tag.encode())
    beside = Beside(final, aside)
    beside.keep(final, aside)
    sync_directory(aside)
    with ExitStack() as undo:
        with disk_errors(final, "published"):
            former = _take_place(aside, final, replaced, undo)
        if former is not None:
            beside.keep(former, final)  # what came since
        sync_directory(directory)
        if latest:
            with disk_errors(directory / LATEST, "written"):
                (final / NEW_LATEST).rename(directory / LATEST)
        undo.pop_all()
    remove(aside)
    remove(replaced)
    if latest:
        sync_directory(directory)


def _take_place(aside: Path, final: Path, replaced: Path, undo: ExitStack) -> Path | None:
    """``aside`` gets the name ``final``, and what had it is kept until both are removed: where it is now, if it was."""

    def undone(rename: Callable[[], object]) -> None:
        with suppress(OSError):
            rename()

    if not os.path.lexists(final):
        aside.rename(final)
        undo.callback(undone, lambda: final.rename(aside))
        return None
    if _exchange(aside, final):
        undo.callback(undone, lambda: _exchange(aside, final))
        return aside
    final.rename(replaced)  # readers look there, too, until the next line is done
    undo.callback(undone, lambda: replaced.rename(final))
    aside.rename(final)
    undo.callback(undone, lambda: final.rename(aside))
    return replaced


def _refuse_foreign(final: Path) -> None:
    """Raises CheckpointError if something is there that is no checkpoint of ours: it would be replaced."""
    if (final / MANIFEST).is_file() or not os.path.lexists(final):
        return
    if final.is_symlink() or not final.is_dir() or any(final.iterdir()):
        raise CheckpointError(
            final, "is there and no checkpoint of infinity's: it would be lost", "move it away, or name another tag"
        )


def remove_leftovers(directory: Path, tag: str) -> None:
    """What dead writers of this host have left goes: nobody holds its lock. Raises CheckpointError if one that lives
    writes the same tag."""
    for path in directory.glob(f"{REPLACED}*"):
        final = directory / path.name.removeprefix(REPLACED)
        if (final / MANIFEST).is_file():
            remove(path)
        else:
            path.rename(final)  # its successor never came
    for path in directory.glob(f"{ASIDE}*"):
        writer, _, theirs = path.name.removeprefix(ASIDE).partition("-")
        if remove_left(path, writer) is Left.LIVES and theirs == _short(tag):
            raise CheckpointError(
                directory / tag,
                "is being saved by another process, or by another engine of this one",
                "wait for it, or name another tag or directory",
            )


def _short(tag: str) -> str:
    """The tag, or where a name has no room for it beside its writer's, what stands for it."""
    fits = len(f"{ASIDE}{new_writer()}-".encode() + os.fsencode(tag)) <= 255
    return tag if fits else blake2b(os.fsencode(tag), digest_size=16).hexdigest()


def _exchange(one: Path, other: Path) -> bool:
    """Each takes the other's name, at once. False where kernel or filesystem cannot."""
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        return False
    if rename(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE) == 0:
        return True
    number = ctypes.get_errno()
    if number in (errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP):
        return False
    raise OSError(number, os.strerror(number), str(other))
