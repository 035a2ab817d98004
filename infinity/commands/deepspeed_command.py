"""The command ``deepspeed``: DeepSpeed's launcher, over torchrun on every node.

One node: torchrun here. Several: the same command by ssh on each of them, with ``--no_ssh --node_rank N``, which ends
with its standard input: that is this process, whatever ends it. A daemon for a node's disks is started by the library
where the configuration asks for one.
"""

from __future__ import annotations

import argparse
import os
import select
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from infinity.commands.hosts import Nodes, chosen, first, nodes_of_hostfile
from infinity.commands.running import environment_of, torchrun
from infinity.deepspeed.constants import DEEPSPEED_ENVIRONMENT_NAME, DLTS_HOSTFILE, TORCH_DISTRIBUTED_DEFAULT_PORT
from infinity.errors import ConfigError
from io_daemon.command.interrupt import end_with, interruptible

LOCAL: Final = "localhost"
RANK: Final = (sys.executable, "-P", "-m", "infinity.commands.deepspeed_rank")
EXPORTED: Final = ("NCCL", "PYTHON", "MV2", "UCX", "MLFLOW", "INFINITY", "HF_", "ACCELERATE", "OMP_")
"""Beginnings of the variables that other nodes get."""
REFUSED: Final[Mapping[str, str]] = {
    "autotuning": "there is no autotuner: `io-daemon bench` finds the settings of the disk",
    "elastic_training": "the world size is fixed while a job runs: start again from the last checkpoint",
    "bind_cores_to_rank": "cores are bound by numactl or the scheduler: leave it out",
    "bind_core_list": "cores are bound by numactl or the scheduler: leave it out",
    "launcher_args": "nodes are reached by ssh: write its options into ~/.ssh/config",
    "venv_script": "every node runs this Python: install infinity at the same path there",
}
SSH: Final = ("pdsh", "ssh")
POLL_S: Final = 0.2
ENDING_TIMEOUT_S: Final = 60.0
"""Torchrun gives its ranks half of it."""
_OTHERS: Final = "is not built: run `infinity run` under srun or mpirun on each node, or leave it out (ssh)"


def deepspeed(words: Sequence[str]) -> int:
    """The command. Raises ConfigError for what cannot work."""
    parsed = _parser().parse_args(list(words))
    _refuse(parsed)
    nodes = _nodes(parsed)
    here = _place(parsed, nodes)
    if here is None:
        return _on_all(parsed, nodes, list(words))
    return _on_this(parsed, nodes, here)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="deepspeed",
        description="Start a script on the devices of one or several nodes, as DeepSpeed's launcher does. On a machine "
        "without accelerators --num_gpus N starts N ranks on the CPU.",
        allow_abbrev=False,
    )
    text: dict[str, Any] = {"default": ""}
    number: dict[str, Any] = {"type": int, "default": -1}
    flag: dict[str, Any] = {"action": "store_true"}
    parser.add_argument("-H", "--hostfile", default=DLTS_HOSTFILE, help="lines such as: worker-0 slots=4")
    parser.add_argument("-i", "--include", **text, help="worker-0@worker-1:0,2: use these alone")
    parser.add_argument("-e", "--exclude", **text, help="use all but these")
    parser.add_argument("--num_nodes", **number, help="the first so many nodes of the hostfile")
    parser.add_argument("--num_gpus", "--num_accelerators", **number, help="the first so many devices of each node")
    parser.add_argument("--master_port", type=int, default=TORCH_DISTRIBUTED_DEFAULT_PORT, help="where ranks meet")
    parser.add_argument("--master_addr", **text, help="node 0's address; by default its name")
    parser.add_argument("--node_rank", **number, help="this node's number, with --no_ssh")
    parser.add_argument("--launcher", default="pdsh", help="pdsh and ssh: nodes are reached by ssh")
    parser.add_argument("--ssh_port", type=int, help="of the other nodes")
    parser.add_argument("--module", **flag, help="the script is a module, as for python -m")
    parser.add_argument("--no_python", **flag, help="the script is a program of its own")
    parser.add_argument("--no_local_rank", **flag, help="do not give the script --local_rank=N")
    parser.add_argument("--no_ssh", **flag, help="this command was started on every node")
    parser.add_argument("--no_ssh_check", **flag, help="taken for the dialect's sake: nothing is tried before")
    parser.add_argument("--force_multi", **flag, help="reach a single node by ssh, too")
    parser.add_argument("--save_pid", **flag, help="print this launcher's process id")
    parser.add_argument("--enable_each_rank_log", default="None", metavar="DIR", help="ranks write to files there")
    parser.add_argument("--log_level", **text, help="taken for the dialect's sake: the launcher says what fails")
    parser.add_argument("-q", "--quiet", **flag, help="taken for the dialect's sake")
    for name in ("autotuning", "launcher_args", "bind_core_list", "venv_script"):
        parser.add_argument(f"--{name}", **text, help=argparse.SUPPRESS)
    for name in ("elastic_training", "bind_cores_to_rank", "ends_with_stdin"):
        parser.add_argument(f"--{name}", **flag, help=argparse.SUPPRESS)
    parser.add_argument("user_script", help="the script, followed by its own arguments")
    parser.add_argument("user_args", nargs=argparse.REMAINDER)
    return parser


def _refuse(parsed: argparse.Namespace) -> None:
    for name, why in REFUSED.items():
        if value := getattr(parsed, name):
            raise ConfigError(f"--{name}", value, why)
    if parsed.launcher.lower() not in SSH:
        raise ConfigError("--launcher", parsed.launcher, _OTHERS)
    if parsed.module and parsed.no_python:
        raise ConfigError("--module", True, "a module needs Python: write --module or --no_python, not both")


def _nodes(parsed: argparse.Namespace) -> Nodes:
    path = Path(parsed.hostfile)
    if path.is_file():
        nodes = nodes_of_hostfile(path.read_text().splitlines(), str(path))
    elif parsed.hostfile not in ("", DLTS_HOSTFILE):
        raise ConfigError("--hostfile", parsed.hostfile, "is not there: leave it out where this machine runs all ranks")
    elif parsed.num_nodes > 1 and not parsed.no_ssh:
        raise ConfigError("--num_nodes", parsed.num_nodes, "several nodes are named in a hostfile: pass --hostfile")
    else:
        nodes = {LOCAL: list(range(_num_devices(parsed)))}
        if parsed.num_nodes > 1:  # each of them was started by hand, and is like this one
            nodes = {f"node-{number}": nodes[LOCAL] for number in range(parsed.num_nodes)}
    if (parsed.include or parsed.exclude) and (parsed.num_nodes > 0 or parsed.num_gpus > 0):
        raise ConfigError("--num_gpus, --num_nodes", "given", "cannot stand beside --include and --exclude")
    nodes = chosen(nodes, include=parsed.include, exclude=parsed.exclude)
    return first(nodes, num_nodes=parsed.num_nodes, num_devices=parsed.num_gpus)


def _num_devices(parsed: argparse.Namespace) -> int:
    """Devices of this node; without accelerators as many ranks as are asked for."""
    import torch

    if torch.accelerator.is_available():
        return int(torch.accelerator.device_count())
    listed = [number for part in (parsed.include, parsed.exclude) for number in part.partition(":")[2].split(",")]
    numbers = [int(number.rpartition("-")[2]) + 1 for number in listed if number.rpartition("-")[2].isdigit()]
    return max(1, int(parsed.num_gpus), *numbers)


def _place(parsed: argparse.Namespace, nodes: Nodes) -> int | None:
    """This node's number among ``nodes``; None if they are to be reached by ssh."""
    if parsed.no_ssh:
        if not 0 <= parsed.node_rank < len(nodes):
            raise ConfigError("--node_rank", parsed.node_rank, f"a number from 0 to {len(nodes) - 1} is needed")
        return int(parsed.node_rank)
    is_here = next(iter(nodes)) in (LOCAL, "127.0.0.1", socket.gethostname())
    return 0 if len(nodes) == 1 and is_here and not parsed.force_multi else None


def _on_this(parsed: argparse.Namespace, nodes: Nodes, here: int) -> int:
    devices = list(nodes.values())[here]
    words = ["--nproc-per-node", str(len(devices))]
    if len(nodes) > 1:
        address = parsed.master_addr or next(iter(nodes))
        words += ["--nnodes", str(len(nodes)), "--node-rank", str(here)]
        words += ["--master-addr", address, "--master-port", str(parsed.master_port)]
    elif parsed.master_addr or parsed.master_port != TORCH_DISTRIBUTED_DEFAULT_PORT:
        words += ["--master-addr", parsed.master_addr or "127.0.0.1", "--master-port", str(parsed.master_port)]
    if parsed.enable_each_rank_log != "None":
        words += ["--log-dir", parsed.enable_each_rank_log, "--redirects", "3"]
    options = [f"--{name}" for name in ("module", "no_python", "no_local_rank") if getattr(parsed, name)]
    words += ["--no-python", *RANK, *options, parsed.user_script, *parsed.user_args]
    # what reaches nodes without a standard input (ssh's StdinNull, kubectl exec) has it end before it begins
    if parsed.ends_with_stdin and sys.stdin is not None and not select.select([sys.stdin], [], [], 0)[0]:
        end_with(sys.stdin.fileno())
    if parsed.save_pid:
        print(f"launcher pid: {os.getpid()}", flush=True)
    return torchrun(words, environment_of(_visible(devices), as_deepspeed=True))


def _visible(devices: Sequence[int]) -> dict[str, str]:
    import torch

    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if accelerator is None or accelerator.type != "cuda":
        return {}
    allowed = environment_of().get("CUDA_VISIBLE_DEVICES", "")
    names = allowed.split(",") if allowed else [str(number) for number in range(torch.cuda.device_count())]
    return {"CUDA_VISIBLE_DEVICES": ",".join(names[device] for device in devices)}


def _on_all(parsed: argparse.Namespace, nodes: Nodes, words: list[str]) -> int:
    """The same command on every node; the first that fails ends the others."""
    address = parsed.master_addr or next(iter(nodes))
    variables = _exported(environment_of(as_deepspeed=True))
    settings = " ".join(f"{name}={shlex.quote(value)}" for name, value in variables.items())
    ssh = ["ssh", "-o", "BatchMode=yes", *(["-p", str(parsed.ssh_port)] if parsed.ssh_port else [])]
    commands = []
    for number, node in enumerate(nodes):
        own = ["--no_ssh", "--ends_with_stdin", "--node_rank", str(number), "--master_addr", address]
        command = shlex.join([sys.executable, "-P", "-m", "infinity", "deepspeed", *own, *words])
        commands.append([*ssh, node, f"cd {shlex.quote(str(Path.cwd()))} && env {settings} {command}"])
    return _run_all(commands)


def _exported(environment: Mapping[str, str]) -> dict[str, str]:
    """What other nodes get of this environment, and of the files ``.deepspeed_env`` here and at home."""
    found = {name: value for name, value in environment.items() if name.startswith(EXPORTED)}
    name = environment.get("DS_ENV_FILE", DEEPSPEED_ENVIRONMENT_NAME)
    for directory in (Path.home(), Path.cwd()):
        path = directory / name
        for line in path.read_text().splitlines() if path.is_file() else ():
            key, equals, value = line.strip().partition("=")
            if equals and not key.startswith("#"):
                found[key] = value
    return found


def _run_all(commands: Sequence[Sequence[str]]) -> int:
    """The exit code of the first that fails. The others end with it, as all do with this process."""
    children: list[subprocess.Popen[bytes]] = []
    try:
        with interruptible():
            for command in commands:
                # in a session of its own it outlives a Ctrl-C, and brings the last words of its node
                child = subprocess.Popen(command, stdin=subprocess.PIPE, env=environment_of(), start_new_session=True)
                children.append(child)
            while any(child.poll() is None for child in children) and not any(child.poll() for child in children):
                time.sleep(POLL_S)
    except FileNotFoundError as error:
        raise ConfigError("--hostfile", "several nodes", "are reached by ssh, which is not here: install it") from error
    finally:
        failed = next((child.poll() for child in children if child.poll()), 0)
        _end(children)
    code = failed or next((child.returncode for child in children if child.returncode), 0)
    return 128 - code if code < 0 else code


def _end(children: Sequence[subprocess.Popen[bytes]]) -> None:
    until = time.monotonic() + ENDING_TIMEOUT_S
    for child in children:
        if child.stdin is not None:
            child.stdin.close()
    try:
        for child in children:
            child.wait(max(0.0, until - time.monotonic()))
    except subprocess.TimeoutExpired:
        print(f"infinity: nodes have not ended within {ENDING_TIMEOUT_S:g} s: they are left", file=sys.stderr)
    finally:
        for child in children:
            if child.poll() is None:
                child.kill()
                child.wait()
