"""Scripts that cannot work, and what each says. ``python -m tests.infinity.deepspeed.errors`` writes the page anew."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from infinity.commands.running import environment_of

PAGE = Path(__file__).resolve().parents[3] / "docs" / "from-deepspeed-errors.md"
HEAD = """\
# What cannot work, and what it says

Each of these scripts ends with the line below it, before anything is trained; `model` is any small module. The page is
written by `python -m tests.infinity.deepspeed.errors`, and a test holds it against what the scripts say.
"""
PRELUDE = """
import deepspeed, torch
from torch import nn

model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
ADAMW = {"type": "AdamW", "params": {"lr": 1e-3}}
BASE = {"train_batch_size": 4, "optimizer": ADAMW, "zero_optimization": {"stage": 3}}

def start(**section):
    return deepspeed.initialize(model=model, config={**BASE, **section})[0]
"""
SCRIPTS: dict[str, str] = {
    "Pipeline parallelism": (
        "from deepspeed.pipe import PipelineModule, LayerSpec\n\n"
        "PipelineModule([LayerSpec(nn.Linear, 8, 8)], num_stages=2)"
    ),
    "Tensor parallelism by call": "deepspeed.tp_model_init(model, tp_size=2, dtype=torch.bfloat16)",
    "Tensor parallelism by configuration": 'start(tensor_parallel={"autotp_size": 2})',
    "A model-parallel unit": "deepspeed.initialize(model=model, config=BASE, mpu=object())",
    "Ulysses sequence parallelism": ("from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF"),
    "Sequence parallelism by configuration": "start(sequence_parallel_size=2)",
    "Mixture of experts of DeepSpeed's": (
        "from deepspeed.moe.layer import MoE\n\nMoE(8, nn.Linear(8, 8), num_experts=4)"
    ),
    "Experts of single ranks": "model[1].weight.allreduce = False\nstart()",
    "Apex": 'start(amp={"enabled": True, "opt_level": "O1"})',
    "A base in 4 or 8 bits": (
        'Params4bit = type("Params4bit", (nn.Parameter,), {})  # as of bitsandbytes\n'
        "model.base = nn.Module()\n"
        "model.base.weight = Params4bit(torch.zeros(8, 8, dtype=torch.uint8), requires_grad=False)\n"
        "start()"
    ),
    "Autotuning": 'start(autotuning={"enabled": True})',
    "Compression": 'start(compression_training={"weight_quantization": {"shared_parameters": {"enabled": True}}})',
    "Sparse attention": 'start(sparse_attention={"mode": "fixed"})',
    "The hybrid engine": 'start(hybrid_engine={"enabled": True})',
    "Kernel injection": "deepspeed.init_inference(model, dtype=torch.half, replace_with_kernel_inject=True)",
    "Transformer kernels": "from deepspeed.ops.transformer import DeepSpeedTransformerLayer",
    "1-bit Adam": 'start(optimizer={"type": "OneBitAdam", "params": {"lr": 1e-3}})',
    "LAMB by name": 'start(optimizer={"type": "Lamb", "params": {"lr": 1e-3}})',
    "Adafactor": "deepspeed.initialize(model=model, optimizer=torch.optim.Adafactor(model.parameters()), config=BASE)",
    "Op builders": "deepspeed.ops.op_builder.CPUAdamBuilder().load()",
    "Elastic training": 'start(elasticity={"enabled": True})',
    "Universal checkpoints": 'start(checkpoint={"load_universal": True})',
    "ZeRO++": 'start(zero_optimization={"stage": 3, "zero_quantized_weights": True})',
    "MiCS": "from deepspeed.runtime.zero.mics import MiCS_Init",
    "Curriculum learning": 'start(curriculum_learning={"enabled": True})',
    "DeepCompile": 'start(compile={"deepcompile": True})',
    "ZenFlow": 'start(zero_optimization={"stage": 2, "zenflow": {"topk_ratio": 0.1}})',
    "Sparse gradients": "from deepspeed.runtime.sparse_tensor import SparseTensor",
    "Ranks that keep gradients of their own at stage 3": "start().no_sync()",
    "A loss of fp16 that nothing scales": (
        'engine = start(fp16={"enabled": True})\nengine(torch.ones(4, 8).half()).sum().backward()'
    ),
    "Gradients by `.grad`": (
        "engine = start()\nengine.backward(engine(torch.ones(4, 8)).sum())\nprint(model[0].weight.grad)"
    ),
    "A pipeline's batches": "start().train_batch(iter([]))",
    "The topology of a pipeline": "from deepspeed.runtime.pipe.topology import ProcessTopology",
    "Ulysses attention": "from deepspeed.sequence.layer import DistributedAttention",
    "A mesh of ranks": "deepspeed.initialize(model=model, config=BASE, mesh_param=(1, 2))",
    "Groups of experts": "deepspeed.utils.groups.initialize(ep_size=2)",
    "Layers of sparse attention": "from deepspeed.ops.sparse_attention import SparseSelfAttention",
    "Compression by call": "from deepspeed.compression.compress import init_compression",
    "The elastic batch size": "from deepspeed.elasticity import compute_elastic_config",
    "0/1 Adam": 'start(optimizer={"type": "ZeroOneAdam", "params": {"lr": 1e-3}})',
    "AIO handles": "from deepspeed.ops.aio import AsyncIOBuilder\n\nAsyncIOBuilder().load()",
    "Comet": 'start(comet={"enabled": True, "project": "p"})',
    "Inference by tensor parallelism": "deepspeed.init_inference(model, mp_size=2, dtype=torch.float32)",
    "Inference in 8 bits": "deepspeed.init_inference(model, dtype=torch.int8)",
    "The profiler by call": "from deepspeed.profiling.flops_profiler import get_model_profile",
    "Timers": "from deepspeed.utils.timer import CudaEventTimer",
    "Optimized linear layers": "from deepspeed.linear import OptimizedLinear, LoRAConfig",
    "Data efficiency": 'start(data_efficiency={"enabled": True, "data_sampling": {"enabled": True}})',
    "Progressive layer drop": 'start(progressive_layer_drop={"enabled": True, "theta": 0.5})',
    "The tool of universal checkpoints": "from deepspeed.checkpoint.ds_to_universal import main",
    "An accelerator of one's own": "from deepspeed.accelerator import set_accelerator",
    "SGD whose states Accelerate offloads": (
        "from accelerate.utils.deepspeed import map_pytorch_optim_to_deepspeed\n\n"
        "sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)\n"
        "map_pytorch_optim_to_deepspeed(sgd)  # prepare() does so, without a word"
    ),
    "A misspelt key": 'start(zero_optimization={"stage": 3, "stage3_max_live_parameter": 1})',
    "A misspelt name": "from deepspeed.utils import safe_get_full_grads",
}
RUNNER = """
import json, sys
said = {}
for title, (prelude, script) in json.load(sys.stdin).items():
    try:
        exec(prelude + script, {})
    except Exception as error:
        said[title] = f"{type(error).__name__}: {error}"
print("\\n" + json.dumps(said))
"""


def said() -> dict[str, str]:
    """What each script ends with, in one process whose ``import deepspeed`` is infinity."""
    ended = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", RUNNER],
        input=json.dumps({title: (PRELUDE, script) for title, script in SCRIPTS.items()}),
        env=environment_of({"OMP_NUM_THREADS": "1"}, as_deepspeed=True),
        capture_output=True,
        text=True,
        timeout=280,
        check=True,
    )
    found: dict[str, str] = json.loads(ended.stdout.splitlines()[-1])
    return found


def page(answers: dict[str, str]) -> str:
    parts = [
        f"## {title}\n\n```python\n{script}\n```\n\n```\n{answers[title]}\n```\n" for title, script in SCRIPTS.items()
    ]
    return "\n".join([HEAD, *parts])


if __name__ == "__main__":
    PAGE.write_text(page(said()))
