"""A copy of the tree of its own, in which one mutant after the other is tested; the working tree is only read."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Final

from tests.mutations.mutant import Mutant
from tests.mutations.rooms import ROOT, Room

CORE_TEST: Final = "csrc/tests/core_test.cpp"
SLOT: Final = Path(__file__).parent / "slot"
BUILD_TIMEOUT_S: Final = 900.0
CORE_TEST_TIMEOUT_S: Final = 60.0
SLOWEST: Final = 3.0
"""How much more CPU time than without a mutation a file of tests may take, and beside that:"""
SPARE_S: Final = 10.0
MEASURED_S_MAX: Final = 600.0


class SlotTree:
    def __init__(self, directory: Path, room: Room) -> None:
        self.tree = directory / "tree"
        self._room = room
        self._build = directory / "build"
        tracked = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True)
        names = [name for name in filter(None, tracked.stdout.split("\0")) if (ROOT / name).is_file()]
        for name in names:
            _copy_if_changed(ROOT / name, self.tree / name)
        for path in (self.tree / room.directory).iterdir():
            if path.suffix in room.suffixes and str(path.relative_to(self.tree)) not in names:
                path.unlink()  # of an earlier copy
        self._digest = _digest([name for name in names if not Path(name).name.startswith("test_")])
        """Of everything but files of tests: of these each has its own."""
        self._measured = directory.parent / f"cpu_s-{'compiled' if room.compiled else 'python'}.json"
        """What every slot has measured, kept with the copies."""
        self._cpu_s: dict[str, float] = {}
        """CPU time that each file of tests takes without a mutation, of those that were asked for."""
        if room.compiled:
            self._configure()
            self._compile_original()
            self._original = self._machine_code()
        environment = {
            **os.environ,
            "MUTATION_TREE": str(self.tree),
            "MUTATION_LOG": str(directory / "log"),
            "PYTHONPATH": os.pathsep.join([str(SLOT), str(self.tree)]),
            "PYTHONDONTWRITEBYTECODE": "1",  # two mutants of one second and one size must not be taken for each other
            "OMP_NUM_THREADS": "1",
        }
        self._worker = subprocess.Popen(
            [sys.executable, "-m", "tests.mutations.worker", *room.warm],
            cwd=self.tree,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def close(self) -> None:
        self._stream(self._worker.stdin).close()
        self._worker.wait()

    def run(self, test: str, cpu_limit_s: float) -> tuple[int | None, float]:
        """Exit code of pytest over a file of tests (None: it hung, or took too long) and seconds of CPU time."""
        stdin, stdout = self._stream(self._worker.stdin), self._stream(self._worker.stdout)
        stdin.write(json.dumps({"test": test, "cpu_limit_s": cpu_limit_s}) + "\n")
        stdin.flush()
        answer = json.loads(stdout.readline())
        return answer["code"], answer["cpu_s"]

    def log(self) -> str:
        """What the last run of pytest printed."""
        return (self.tree.parent / "log").read_text(errors="replace")

    def test(self, mutant: Mutant, tests: Sequence[str]) -> tuple[str, str]:
        """What became of it ("killed", "timeout", "survived"; "stillborn" if it does not compile, "equivalent" if it
        compiles to the same), and by which test, or why."""
        if self._room.compiled:
            for test in tests:
                self._measure(test)
            with self._mutated(mutant):
                if (result := self._rebuilt()) is not None:
                    return result
        for test in tests:
            self._measure(test)
            with self._mutated(mutant):
                code, _ = self.run(test, SPARE_S + SLOWEST * self._cpu_s[test])
            if code != 0:
                return "timeout" if code is None else "killed", test
        return "survived", ""

    def sees(self, mutants: Sequence[Mutant], test: str, cpu_limit_s: float) -> bool:
        """Whether a test fails with all of them in place, or hangs; it has to pass without.

        Raises ``SystemExit`` if it does not, or if what was made of the sources does not compile, or has no test."""
        if self._room.compiled:
            self._compile_original()
        if not (self._core_test_passes() if test == CORE_TEST else self.run(test, cpu_limit_s)[0] == 0):
            raise SystemExit(f"{'' if test == CORE_TEST else self.log()}\n{test} fails as the sources are")
        with contextlib.ExitStack() as mutations:
            for mutant in mutants:
                mutations.enter_context(self._mutated(mutant))
            if self._room.compiled and not self._compile("core_test" if test == CORE_TEST else "_native"):
                raise SystemExit(f"{mutants[0].path}: does not compile then")
            if test == CORE_TEST:
                return not self._core_test_passes()
            code, _ = self.run(test, cpu_limit_s)
        if code not in (0, 1, None):
            raise SystemExit(f"{self.log()}\n{test}: pytest ends with status {code}")
        return code != 0

    def _rebuilt(self) -> tuple[str, str] | None:
        """What became of a mutant that no test of Python's need look at."""
        if not self._compile("core_test"):
            return "stillborn", ""
        if not self._core_test_passes():
            return "killed", CORE_TEST
        if not self._compile("core_test", "_native"):
            return "stillborn", ""
        return (
            ("equivalent", "it compiles to the same machine code") if self._machine_code() == self._original else None
        )

    def _measure(self, test: str) -> None:
        """How long a file of tests takes without a mutation; it has to pass."""
        if test in self._cpu_s:
            return
        key = f"{test} {_digest([test])} {self._digest}"
        known = _read_json(self._measured)
        if key not in known:
            if self._room.compiled:
                self._compile_original()  # what was built last may be a mutant
            code, known[key] = self.run(test, MEASURED_S_MAX)
            if code != 0:
                raise SystemExit(f"{self.log()}\n{test} fails without a mutation")
            self._measured.write_text(json.dumps({**_read_json(self._measured), key: known[key]}))
        self._cpu_s[test] = known[key]

    @contextlib.contextmanager
    def _mutated(self, mutant: Mutant) -> Iterator[None]:
        path = self.tree / mutant.path
        source = path.read_bytes()
        path.write_bytes(mutant.apply(source))
        try:
            yield
        finally:
            path.write_bytes(source)

    def _machine_code(self) -> bytes:
        digest = hashlib.blake2b()
        for built in (*self._build.glob("_native*.so"), self._core_test):
            digest.update(built.read_bytes())
        return digest.digest()

    def _configure(self) -> None:
        cmake = ["cmake", "-S", str(self.tree), "-B", str(self._build), "-G", "Ninja", "--log-level=WARNING"]
        nanobind = subprocess.run(
            [sys.executable, "-m", "nanobind", "--cmake_dir"], capture_output=True, text=True, check=True
        )
        options = [
            "-DCMAKE_BUILD_TYPE=Debug",
            "-DCMAKE_CXX_FLAGS_DEBUG=-O0",
            "-DINFINITY_BUILD_TESTS=ON",
            f"-DPython_EXECUTABLE={sys.executable}",
        ]
        subprocess.run(
            [*cmake, *options, f"-Dnanobind_DIR={nanobind.stdout.strip()}"], check=True, stdout=subprocess.DEVNULL
        )

    def _compile_original(self) -> None:
        if not self._compile("core_test", "_native"):
            raise SystemExit("the core does not compile without a mutation")

    def _compile(self, *targets: str) -> bool:
        build = ["cmake", "--build", str(self._build), "--target", *targets]
        run = subprocess.run(build, capture_output=True, timeout=BUILD_TIMEOUT_S, check=False)
        if run.returncode == 0 and "_native" in targets:
            (module,) = self._build.glob("_native*.so")
            target = self.tree / "io_daemon" / module.name
            shutil.copy2(module, target.with_suffix(".new"))
            target.with_suffix(".new").rename(target)  # a new file: whoever has mapped the old one keeps it
        return run.returncode == 0

    @property
    def _core_test(self) -> Path:
        return self._build / "csrc" / "tests" / "core_test"

    def _core_test_passes(self) -> bool:
        try:
            run = subprocess.run([self._core_test], capture_output=True, timeout=CORE_TEST_TIMEOUT_S, check=False)
        except subprocess.TimeoutExpired:
            return False
        return run.returncode == 0

    @staticmethod
    def _stream(stream: IO[str] | None) -> IO[str]:
        if stream is None:
            raise ValueError("the worker's streams are pipes")
        return stream


def _read_json(path: Path) -> dict[str, float]:
    found: dict[str, float] = json.loads(path.read_text()) if path.is_file() else {}
    return found


def _digest(names: Sequence[str]) -> str:
    """Of the working tree's files of these names."""
    digest = hashlib.blake2b(digest_size=8)
    for name in names:
        digest.update(name.encode() + b"\0" + hashlib.blake2b((ROOT / name).read_bytes()).digest())
    return digest.hexdigest()


def _copy_if_changed(source: Path, target: Path) -> None:
    """What is built from an earlier copy stays up to date."""
    target.parent.mkdir(parents=True, exist_ok=True)
    if not target.is_file() or target.read_bytes() != source.read_bytes():
        shutil.copy(source, target)
