"""The scripts under ``examples/``, unmodified, on a real DeepSpeed and on infinity: their losses side by side.

``python -m benchmarks.same_scripts --deepspeed-venv DIR`` runs each on both, on one rank and on two, and prints the
first loss, the last, and the largest relative difference of all. The real one has a virtual environment of its own with
this one's versions of torch, Transformers, Accelerate and PEFT; a script that fails on it is named with its error. What
also trains in memory, without DeepSpeed, is run so, too: on one rank infinity's losses must be these, bit by bit, on
two, where gradients of micro-batches are summed in another order, within 1e-6. Exit code 0 if they are, and if every
other pair that ran on both is equal within 1e-6 in fp32, or 1e-3 in fp16.

Answers are kept one by one in results/same_scripts.json: ``--missing`` runs only what has none there, so that an
evening's pieces make the whole.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from benchmarks.deepspeed_venv import environment_of, prepare_venv
from benchmarks.machine import free_port
from benchmarks.place import add_directory
from benchmarks.script_rows import ENVIRONMENT, EXAMPLES, OUT, Row, furnish, rows
from benchmarks.side import RESULTS, keep_results
from io_daemon.command.scratch import scratch_directory

LOSSES: Final = ("losses", "resumed", "following", "again", "eval_loss", "tokens")
"""What the scripts print, or the loop's report has; of tokens 0 differ, or it does not hold."""
SIDES: Final = ("deepspeed", "infinity", "plain")
NOT_RUN: Final = {"error": "it was not run"}
RELATIVE_OF_RANKS: Final = 1e-6


class Contender:
    """Runs scripts: ``prefix`` is what stands before the launcher's words."""

    def __init__(
        self,
        prefix: Sequence[str],
        directory: Path,
        model: Path,
        timeout_s: float,
        environment: Mapping[str, str] | None = None,
        *,
        meets: bool = False,
    ) -> None:
        """``meets``: on several ranks it needs the process group before the script, where a row says so."""
        self._prefix, self._directory, self._model, self._timeout_s = prefix, directory, model, timeout_s
        self._environment, self._meets = environment or {}, meets

    def run(self, row: Row, num_ranks: int, words: Sequence[str] | None = None) -> dict[str, Any]:
        """What the script printed with the row's words and launcher, or with ``words`` under torchrun; or
        ``{"error": its last line}``."""
        launcher = row.launcher if words is None else None
        words = row.words if words is None else words
        if self._meets and row.meets and num_ranks > 1:
            words = ("meet.py", *words)
        with scratch_directory("script-", self._directory) as directory:
            furnish(directory, self._model)
            answer = self._once(_launch(launcher, num_ranks), words, directory)
            if row.resumed and "error" not in answer:
                shutil.rmtree(directory / OUT / "checkpoint-6")  # over which the real one cannot save under NVMe
                words = (*words, "--resume_from_checkpoint", f"{OUT}/checkpoint-3")
                answer = self._once(_launch(launcher, num_ranks), words, directory)
            return answer

    def _once(self, launch: Sequence[str], words: Sequence[str], directory: Path) -> dict[str, Any]:
        process = subprocess.Popen(
            [*self._prefix, *launch, *words],
            cwd=directory,
            env={**os.environ, **ENVIRONMENT, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", **self._environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            printed, errors = process.communicate(timeout=self._timeout_s)
        except subprocess.TimeoutExpired:
            process.terminate()  # launchers end their ranks then, which a kill would leave
            process.communicate()
            return {"error": f"no end within {self._timeout_s:.0f} s"}
        answers = [line for line in printed.splitlines() if line.startswith(('{"losses', '{"tokens'))]
        report = directory / OUT / "report-0.json"
        answers += [report.read_text()] if report.exists() else []
        if process.returncode or not answers:
            said = [
                line for line in errors.splitlines() if re.search("Error|error:", line) and "ChildFailed" not in line
            ]
            return {"error": (said or ["it said nothing"])[0].strip()[-200:]}
        found: dict[str, Any] = json.JSONDecoder().raw_decode(answers[-1])[0]  # ranks may print on one line
        return found


def _launch(launcher: Sequence[str] | None, num_ranks: int) -> list[str]:
    port = str(free_port())
    if launcher is None:
        return ["-m", "torch.distributed.run", "--nproc-per-node", str(num_ranks), "--master-port", port]
    where = ["--num_processes", str(num_ranks), "--main_process_port", port]
    return ["-m", "accelerate.commands.launch", *launcher, *where]


def parts_of(answer: Mapping[str, Any]) -> dict[str, list[float]]:
    """The losses that a script printed, by what it calls them."""
    found = {name: answer[name] for name in LOSSES if name in answer}
    return {name: value if isinstance(value, list) else [value] for name, value in found.items()}


def compare(row: Row, num_ranks: int, answers: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """One line of the table: the largest relative difference of each part, also from what trained in memory."""
    line: dict[str, Any] = {"script": row.name, "ranks": num_ranks, **answers}
    theirs, ours, plain = (answers.get(side, NOT_RUN) for side in SIDES)
    verdicts: list[bool] = []
    if "error" not in ours and "error" not in theirs:
        line["relative"] = _differences(theirs, ours)
        verdicts += [
            value <= row.relative for name, value in line["relative"].items() if name not in row.forgotten
        ]  # where nothing is compared, nothing holds either
    if "error" not in ours and "error" not in plain:
        line["relative_to_plain"] = _differences(plain, ours)
        verdicts += [
            value <= (0.0 if num_ranks == 1 else RELATIVE_OF_RANKS) for value in line["relative_to_plain"].values()
        ]
        if "relative" in line:  # whose departure it is
            line["deepspeed_to_plain"] = _differences(plain, theirs)
    if verdicts:
        line["holds"] = all(verdicts)
    return {**line, "why": row.why} if row.why else line


def _differences(expected: Mapping[str, Any], found: Mapping[str, Any]) -> dict[str, float]:
    of, among = parts_of(found), parts_of(expected)
    return {name: _relative(among[name], of[name]) for name in among}


def _relative(theirs: Sequence[float], ours: Sequence[float]) -> float:
    return max(abs(a - b) / max(abs(a), 1e-9) for a, b in zip(theirs, ours, strict=True))


def shown(answer: Mapping[str, Any]) -> str:
    """The first loss and the last of each part, or the error."""
    if "error" in answer:
        return str(answer["error"])[:80]
    return ", ".join(f"{name} {part[0]:.7f} … {part[-1]:.7f}" for name, part in parts_of(answer).items())


def kept_lines() -> dict[tuple[str, int], dict[str, Any]]:
    """The lines of the results, by script and number of ranks."""
    path = RESULTS / "same_scripts.json"
    older = json.loads(path.read_text())["rows"] if path.exists() else []
    return {(each["script"], each["ranks"]): each for each in older}


def kept_of(row: Row, num_ranks: int) -> dict[str, Any]:
    """The row's line in the results; what ran in memory may be another row's that runs the same there."""
    lines = kept_lines()
    found = dict(lines.get((row.name, num_ranks), {}))
    for other in rows() if "error" in found.get("plain", NOT_RUN) else ():
        if (other.in_memory, other.resumed) == (row.in_memory, row.resumed):
            found["plain"] = lines.get((other.name, num_ranks), {}).get("plain", NOT_RUN)
            if "error" not in found["plain"]:
                break
    return found


def keep_line(line: Mapping[str, Any]) -> None:
    """Write the row in the place of an older one of the same script and number of ranks."""
    lines = {**kept_lines(), (line["script"], line["ranks"]): line}
    keep_results("same_scripts", {"rows": [lines[key] for key in sorted(lines)]})


def lines_of(
    row: Row, num_ranks: int, contenders: Mapping[str, Contender], kept: Mapping[str, Any]
) -> Iterator[dict[str, Any]]:
    """The row after each side; those that ``kept`` has without an error are not run again."""
    answers = {}
    for side in SIDES:
        words = row.in_memory if side == "plain" else None
        if side == "plain" and words is None:
            continue
        known = kept.get(side, NOT_RUN)
        answers[side] = contenders[side].run(row, num_ranks, words) if "error" in known else known
        yield compare(row, num_ranks, answers)


def print_line(line: Mapping[str, Any]) -> None:
    """The row of the table."""
    print(f"{line['script']}, {line['ranks']} rank{'s' * (line['ranks'] > 1)}: holds: {line.get('holds')}")
    for side in SIDES:
        if side in line:
            print(f"  {side:9} {shown(line[side])}")
    told = (("relative", "from DeepSpeed"), ("relative_to_plain", "from plain"), ("deepspeed_to_plain", "DeepSpeed's"))
    for key, of in told:
        if key in line:
            print(f"  {of} " + ", ".join(f"{name} {value:.1e}" for name, value in line[key].items()))
    sys.stdout.flush()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--deepspeed-venv", type=Path, required=True, help="made where it is not there")
    parser.add_argument("--packages", type=Path, help="Transformers and what it needs, where the venv has none")
    add_directory(parser, "--dir")
    parser.add_argument("--model", type=Path, help="a directory that examples/text.py has made")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--only", default="", help="a regular expression for names of rows")
    parser.add_argument("--missing", action="store_true", help="do not run again what the results have an answer of")
    parser.add_argument("--timeout", type=float, default=600, help="seconds that one script may take")
    options = parser.parse_args()
    extras = [f"{name}=={importlib.metadata.version(name)}" for name in ("transformers", "accelerate", "peft")]
    python = prepare_venv(options.deepspeed_venv, () if options.packages else extras)
    theirs = environment_of(python) | ({"PYTHONPATH": str(options.packages)} if options.packages else {})
    lines = []
    with scratch_directory("infinity-bench-", options.dir) as directory:
        model = directory / "model"
        if options.model is None:
            subprocess.run([sys.executable, EXAMPLES / "text.py", model], check=True, capture_output=True)
        else:
            model.symlink_to(options.model.absolute())
        as_deepspeed = [sys.executable, "-m", "infinity", "as-deepspeed", sys.executable]
        contenders = {
            "deepspeed": Contender([python], directory, model, options.timeout, theirs, meets=True),
            "infinity": Contender(as_deepspeed, directory, model, options.timeout),
            # without DeepSpeed Accelerate has several ranks on CPUs only where it hears of them
            "plain": Contender([sys.executable], directory, model, options.timeout, {"ACCELERATE_USE_CPU": "true"}),
        }
        for row in rows():
            for num_ranks in options.ranks if re.search(options.only, row.name) else ():
                kept = kept_of(row, num_ranks) if options.missing else {}
                line: dict[str, Any] = {}
                for line in lines_of(row, num_ranks, contenders, kept):
                    keep_line(line)  # also where the next side is cut off
                lines.append(line)
                print_line(line)
    return int(any("error" in line["infinity"] or not line.get("holds", True) for line in lines))


if __name__ == "__main__":
    sys.exit(main())
