"""The plain torch loop of ``benchmarks.compare``: everything in memory, mixed precision by hand, or all in fp32; on an
accelerator, if there is one, as the engine is."""

from __future__ import annotations

import torch

from benchmarks.gpt import GPT, GPTShape, token_batch
from benchmarks.step_loop import claim_stdout, serve_steps
from benchmarks.worker_options import worker_parser


def main() -> None:
    arguments = worker_parser(__doc__).parse_args()
    answers_fd = claim_stdout()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(arguments.seed)
    shape = GPTShape(d_model=arguments.d_model, num_layers=arguments.num_layers, sequence=arguments.sequence)
    device = (torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None) or "cpu"
    model = GPT(shape).to(device)
    mixed = arguments.dtype == "bf16"
    masters = [param.detach().clone() if mixed else param for param in model.parameters()]
    if mixed:
        model = model.to(torch.bfloat16)
    params: list[torch.Tensor] = list(model.parameters())
    # without decay, as the dialect's AdamW
    optimizer = torch.optim.AdamW(masters, lr=arguments.learning_rate, weight_decay=0.0, fused=True)

    def step(index: int) -> float:
        loss = model(token_batch(shape, step=index, batch=arguments.batch, seed=arguments.seed).to(device))
        loss.backward()
        for param, master in zip(params, masters, strict=True) if mixed else ():
            master.grad = None if param.grad is None else param.grad.float()
            param.grad = None
        if arguments.clipping:
            torch.nn.utils.clip_grad_norm_(masters, arguments.clipping)
        optimizer.step()
        optimizer.zero_grad()
        if mixed:
            with torch.no_grad():
                torch._foreach_copy_(params, masters)
        return float(loss.detach())

    serve_steps(answers_fd, step, lambda: {"version": torch.__version__})


if __name__ == "__main__":
    main()
