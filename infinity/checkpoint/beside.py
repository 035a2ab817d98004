"""What users have put beside a checkpoint's files, in the directory of its tag: it outlives the checkpoint.

A save into the same tag is a new directory in the place of the former one, so these entries get a second name in the
new one before it takes the place, and once more after, for what came meanwhile: whatever ends the writer, they are
there. They are no part of any checkpoint: who opens, verifies or exports one goes by its manifest.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Container
from contextlib import suppress
from pathlib import Path
from typing import Final

from infinity.checkpoint.disk import disk_errors
from infinity.checkpoint.manifest import MANIFEST, SHARED_STATE
from infinity.checkpoint.model_states import MODEL_STATES
from infinity.checkpoint.sealed import read_sealed
from infinity.errors import CheckpointError
from infinity.files.aside import sync

NEW_LATEST: Final = ".infinity-latest"
"""The next ``latest``, which waits among a checkpoint's files until that has its place."""

_RANKS: Final = re.compile(r"rank-\d{5,}\.(pieces|json|pt)")


class Beside:
    """The entries of ``former`` that are not the checkpoint's in it, and what becomes of them in ``new``."""

    def __init__(self, former: Path, new: Path) -> None:
        """
        Args:
            former: the directory that is to be replaced, which need not be there.
            new: the whole one that comes in its place.
        """
        self._final, self._former_files = former, _files_of(former)
        with disk_errors(new, "read"):
            self._new_files = frozenset(os.listdir(new))

    def keep(self, former: Path, new: Path) -> None:
        """Have them in ``new``, too, on the disk; those that are there already stay. Both may have been renamed.

        Raises CheckpointError where the new checkpoint has a file of the same name, or the disk refuses."""
        if not os.path.lexists(former):
            return
        with disk_errors(self._final, "kept beside the new checkpoint"):
            self._refuse_taken(former)
            _keep(former, new, leave=self._former_files)

    def _refuse_taken(self, former: Path) -> None:
        for name in sorted(self._new_files.intersection(os.listdir(former)) - self._former_files):
            raise CheckpointError(
                self._final / name,
                "is no file of the checkpoint's there, and the new one has a file of that name: it would be lost",
                "move it away, or name another tag",
            )


def _files_of(directory: Path) -> frozenset[str]:
    """The names of a checkpoint's own files in its directory. Of one whose manifest is damaged they are all that a
    checkpoint may have; of one without a manifest, none."""
    if not (directory / MANIFEST).is_file():
        return frozenset()
    try:
        named = frozenset(read_sealed(directory / MANIFEST)[0]["files"])
    except (CheckpointError, ValueError, KeyError, TypeError):
        with disk_errors(directory, "read"):
            there = os.listdir(directory)
        named = frozenset(name for name in there if name in (SHARED_STATE, MODEL_STATES) or _RANKS.fullmatch(name))
    return named | {MANIFEST, NEW_LATEST}


def _keep(former: Path, new: Path, *, leave: Container[str] = ()) -> None:
    """Give each entry of one directory a place in the other, and have its name on the disk."""
    with os.scandir(former) as found:
        entries = [entry for entry in found if entry.name not in leave]
    for entry in entries:
        with suppress(FileNotFoundError, FileExistsError):  # whose it is has removed it meanwhile, or made it anew
            if entry.is_dir(follow_symlinks=False):
                _keep_directory(Path(entry.path), new / entry.name)
            elif not os.path.lexists(new / entry.name):
                _keep_file(Path(entry.path), new / entry.name)
    if entries:
        sync(new)


def _keep_directory(former: Path, new: Path) -> None:
    """Directories have one name: a new one gets the entries of the former."""
    is_new = not os.path.lexists(new)
    if is_new:
        new.mkdir()
    _keep(former, new)
    if is_new:
        shutil.copystat(former, new)  # it may forbid writing, so it comes last


def _keep_file(former: Path, new: Path) -> None:
    """A file gets a second name, as do links and pipes; it is copied where that cannot be, as on some filesystems."""
    try:
        os.link(former, new, follow_symlinks=False)
    except (FileNotFoundError, FileExistsError):
        raise
    except OSError:
        shutil.copy2(former, new, follow_symlinks=False)
        if not new.is_symlink():
            sync(new)
