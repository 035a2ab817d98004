"""A loop of one's own with Accelerate. DeepSpeed is said by its plugin:

    infinity as-deepspeed torchrun --nproc-per-node 2 examples/accelerate_loop.py --model DIRECTORY \
        --plugin examples/accelerate_nvme.json

or by the configuration of ``accelerate launch``, and then nothing in the script knows of it. Accelerate's launcher
drops the path of the swap files, which its plugin takes from the environment:

    export ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_NVME_PATH=swap ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_NVME_PATH=swap
    infinity as-deepspeed accelerate launch --config_file examples/accelerate.yaml examples/accelerate_loop.py \
        --model DIRECTORY
"""

from __future__ import annotations

import argparse
import json

import torch
from accelerate import Accelerator, DeepSpeedPlugin
from accelerate.utils import InitProcessGroupKwargs, set_seed
from text import Text
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, get_scheduler


def main() -> None:
    parser = argparse.ArgumentParser(description="train a small model with Accelerate")
    parser.add_argument("--model", required=True, help="a directory, as save_pretrained writes it")
    parser.add_argument("--plugin", metavar="FILE", help="a DeepSpeed configuration, given to the plugin")
    parser.add_argument("--output", default="out", help="where the state is saved, and the model")
    options = parser.parse_args()
    plugin = DeepSpeedPlugin(hf_ds_config=options.plugin) if options.plugin else None
    # over DeepSpeed itself Accelerate sees one rank alone on CPUs, unless a backend is named; cpu=True drops the plugin
    on_cpus = torch.distributed.is_torchelastic_launched() and not torch.cuda.is_available()
    groups = [InitProcessGroupKwargs(backend="gloo")] if on_cpus else None
    accelerator = Accelerator(deepspeed_plugin=plugin, gradient_accumulation_steps=2, kwargs_handlers=groups)
    set_seed(0)
    model = AutoModelForCausalLM.from_pretrained(options.model)
    loader = DataLoader(Text(0, 48), batch_size=4)
    if accelerator.state.deepspeed_plugin and "optimizer" in accelerator.state.deepspeed_plugin.deepspeed_config:
        from accelerate.utils import DummyOptim, DummyScheduler

        optimizer = DummyOptim(model.parameters(), lr=1e-3)
        scheduler = DummyScheduler(
            optimizer, lr_scheduler_callable=lambda optimizer: get_scheduler("linear", optimizer, 2, 20)
        )
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0, fused=True)
        num_ranks = accelerator.num_processes  # so often Accelerate steps a schedule that is not the engine's
        scheduler = get_scheduler("linear", optimizer, 2 * num_ranks, 20 * num_ranks)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)

    def epoch() -> list[float]:
        losses = []
        for batch in loader:
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            losses.append(accelerator.gather(loss.detach()).mean().item())
        return losses

    losses = epoch()
    accelerator.save_state(f"{options.output}/state")
    following = epoch()
    accelerator.load_state(f"{options.output}/state")
    again = epoch()
    state = accelerator.get_state_dict(model)
    if accelerator.is_main_process:
        accelerator.unwrap_model(model).save_pretrained(f"{options.output}/model", state_dict=state)
        by = accelerator.distributed_type.value
        print(json.dumps({"losses": losses, "following": following, "again": again, "by": by}))
    accelerator.end_training()


if __name__ == "__main__":
    main()
