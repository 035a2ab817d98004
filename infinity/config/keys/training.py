"""Batch sizes, precision, reductions, logging, optimizer and schedule."""

from __future__ import annotations

from infinity.config.keys.key import Key, refused, subsumed, works

_PREDIVIDE = "gradients are divided by it before their sum, by the rest after; 1: by the number of ranks before, as DDP"
_BATCH = "train_batch_size = train_micro_batch_size_per_gpu x gradient_accumulation_steps x world size"

LOOP: tuple[Key, ...] = (
    subsumed("$schema", "string", "for editors: `infinity config schema` prints what it may name"),
    works("train_batch_size", _BATCH, auto="default"),
    works("train_micro_batch_size_per_gpu", _BATCH, auto="default"),
    works("gradient_accumulation_steps", _BATCH, auto="default"),
    works("gradient_clipping", "largest global gradient norm, 0 = off"),
    works("steps_per_print", "optimizer steps between progress lines, 0 or Infinity = never", auto="default"),
    works("communication_data_type", "dtype of the gradients' reduction: fp32, bf16 or fp16"),
    *(
        refused(name, "there is no sequence parallelism", "remove it", accepts=("fp32",))
        for name in ("seq_parallel_communication_data_type", "seq_parallel_comm_data_type")
    ),
    refused("sequence_parallel_size", "there is no sequence parallelism", "write 1", accepts=(1,)),
    works(
        "prescale_gradients", "true: gradients are divided by the number of ranks before their sum, by nothing after"
    ),
    works("gradient_predivide_factor", _PREDIVIDE),
    works("gradient_allreduce_op", "mean, or sum: gradients of all ranks are added up and divided by nothing"),
    refused("sparse_gradients", "embedding gradients are dense", "write false", accepts=(False,)),
    refused("disable_allgather", "stage 3 cannot do without all-gather", "write false", accepts=(False,)),
    works("managed_gradient_accumulation", "false: every step() updates with what was accumulated before it"),
    works("wall_clock_breakdown", "times of forward, backward and update in the log, every steps_per_print steps"),
    works("memory_breakdown", "memory of process, node and device in the log, every steps_per_print steps"),
    works("dump_state", "the resolved configuration in the log at initialize"),
    works("log_level", "level of the loggers infinity and io_daemon: debug, info, warning, error or critical"),
    refused("disable_python_gc", "the collector is the caller's", "call gc.disable() yourself", accepts=(False,)),
    works("dataloader_drop_last", "the loader of training_data leaves out a last micro-batch that is not full"),
    subsumed("vocabulary_size", "whole number", "the model knows its own; the key only warned of odd sizes"),
    subsumed(
        "zero_allow_untested_optimizer",
        "boolean",
        "an optimizer is served or refused by name at initialize; false has `deepspeed.initialize` refuse what "
        "DeepSpeed lists as untested, too",
    ),
    subsumed("zero_force_ds_cpu_optimizer", "boolean", "torch's fused implementation runs on every device"),
)

PRECISION: tuple[Key, ...] = (
    works("bf16.enabled", "16-bit weights with fp32 master weights and moments"),
    subsumed("bf16.immediate_grad_update", "boolean", "gradients are added to the accumulator as each is produced"),
    works("bf16.check_grad_overflow", "skip a step whose gradients are not all finite"),
    works("bf16.bf16_master_weights_and_grads", "step the bf16 weights themselves, without fp32 copies; loses bits"),
    works("bf16.bf16_optimizer_states", "keep the optimizer's states in bf16, too; loses bits"),
    works("fp16.enabled", "16-bit weights with fp32 master weights, and a scaled loss"),
    works("fp16.auto_cast", "cast floating-point inputs of forward to fp16"),
    works("fp16.loss_scale", "the loss is multiplied by it; 0 = dynamic"),
    works("fp16.initial_scale_power", "the dynamic scale begins at 2 to this power"),
    works("fp16.loss_scale_window", "good steps before the dynamic scale is doubled"),
    works("fp16.hysteresis", "overflows before the dynamic scale is halved"),
    works("fp16.consecutive_hysteresis", "a good step makes the count of overflows begin anew"),
    works("fp16.min_loss_scale", "smallest dynamic scale; an overflow there ends training"),
    refused(
        "fp16.fp16_master_weights_and_grads",
        "an update smaller than a 2048th of its weight would be lost",
        "write false, or use bf16.bf16_master_weights_and_grads",
        accepts=(False,),
    ),
    subsumed("fp16.fused_mode", "boolean", "one implementation serves fp16"),
    works("torch_autocast.enabled", "torch.autocast around the engine's forward; weights and all states stay fp32"),
    works("torch_autocast.dtype", "bf16, or fp16 with torch's own loss scaling"),
    subsumed(
        "torch_autocast.lower_precision_safe_modules",
        "list",
        "weights travel as they are; communication_data_type asks for narrower gradients",
    ),
    works("data_types.param_dtype", "the dtype of weights, which bf16.enabled or fp16.enabled has to say as well"),
    works("data_types.grad_accum_dtype", "dtype in which gradients are kept until the update"),
    works(
        "data_types.buffer_dtype",
        "dtype of floating-point buffers; by default those of a state dict follow fp32 weights into 16 bits, and all "
        "others, and all of a model that comes in 16 bits, stay as they are",
    ),
    works(
        "data_types.keep_in_fp32_modules",
        'names of buffers that stay fp32, * for any characters; "auto": those that the model lists itself',
        auto="value",
    ),
)

OPTIMIZER: tuple[Key, ...] = (
    works(
        "optimizer.type",
        "Adam, AdamW, Adagrad, Lion, SGD, Muon, RMSprop, Adadelta, Adamax, NAdam, RAdam, ASGD or Rprop, in any case, "
        "torch's with `fused=True` where it has that; Adam: AdamW unless adam_w_mode is false",
    ),
    works("optimizer.params.lr", "learning rate"),
    works("optimizer.params.weight_decay", "weight decay"),
    works(
        "optimizer.params.betas",
        "all Adams, Lion, Muon (of what is no matrix): decay of the moments",
    ),
    works(
        "optimizer.params.eps",
        "all but Lion, SGD, ASGD, Rprop: added to the denominator",
    ),
    works("optimizer.params.adam_w_mode", "false: Adam adds weight decay to the gradient (L2)"),
    works("optimizer.params.amsgrad", "Adam, AdamW: divide by the largest second moment so far"),
    works("optimizer.params.bias_correction", "false: Adam, AdamW use the moments as they are"),
    works("optimizer.params.momentum", "SGD, Muon, RMSprop: decay of the momentum"),
    works("optimizer.params.dampening", "SGD: damps what a gradient adds to the momentum"),
    works("optimizer.params.nesterov", "SGD: look ahead along the momentum"),
    *(
        works(f"optimizer.params.{name}", note)
        for name, note in (
            ("muon_lr", "Muon: learning rate of matrices instead of lr"),
            ("adam_lr", "Muon: learning rate of embeddings, lm_head and what is no matrix, instead of lr"),
            ("ns_method", 'Muon: how matrices are orthogonalised: "gram" (the default) or "standard"'),
            ("alpha", "RMSprop: decay of the squares; ASGD: power of the learning rate's decay"),
            ("centered", "RMSprop: subtract the mean"),
            ("rho", "Adadelta: decay of the squares"),
            ("momentum_decay", "NAdam: decay of the momentum"),
            ("decoupled_weight_decay", "NAdam, RAdam: decay as AdamW does"),
            ("lambd", "ASGD: decay"),
            ("t0", "ASGD: the step at which averaging begins"),
            ("etas", "Rprop: factors of a step that shrinks and that grows"),
            ("step_sizes", "Rprop: least and largest step"),
        )
    ),
    works("optimizer.params.lr_decay", "Adagrad: decay of the learning rate"),
    works("optimizer.params.initial_accumulator_value", "Adagrad: first sum of squares"),
    works(
        "optimizer.params.torch_adam", "true: the bits and the default of weight_decay are torch.optim.AdamW's, 0.01"
    ),
    refused(
        "optimizer.params.fp32_optimizer_states",
        "moments have the dtype of what is stepped",
        "write true, or bf16.bf16_optimizer_states: true",
        accepts=(True,),
    ),
    refused("optimizer.params.max_grad_norm", "clipping is global", "write gradient_clipping at the top"),
    refused("optimizer.legacy_fusion", "there is one implementation", "write false", accepts=(False,)),
)

_WARM_UP = "WarmupLR, WarmupDecayLR"
SCHEDULER: tuple[Key, ...] = (
    works("scheduler.type", "WarmupLR, WarmupDecayLR, WarmupCosineLR, OneCycle or LRRangeTest"),
    *(
        works(f"scheduler.params.{name}", note)
        for name, note in (
            ("last_batch_iteration", "updates already made: the first step of the schedule is the one after them"),
            ("total_num_steps", "WarmupDecayLR, WarmupCosineLR: optimizer steps until the end of the decay"),
            ("warmup_min_lr", f"{_WARM_UP}: learning rate at the start, or one for each param group"),
            ("warmup_max_lr", f"{_WARM_UP}: learning rate after the warm-up, or one for each param group"),
            ("warmup_min_ratio", "WarmupCosineLR: start, as a ratio of the optimizer's rate"),
            ("cos_min_ratio", "WarmupCosineLR: end, as a ratio of the optimizer's rate"),
            ("warmup_num_steps", f"{_WARM_UP}, WarmupCosineLR: optimizer steps of warm-up"),
            ("warmup_type", f"{_WARM_UP}, WarmupCosineLR: log or linear"),
            ("cycle_min_lr", "OneCycle: learning rate at both ends of the cycle, or one for each param group"),
            ("cycle_max_lr", "OneCycle: learning rate at its peak, or one for each param group"),
            ("decay_lr_rate", "OneCycle: after the cycle the rate is divided by 1 + this, each decay_step_size steps"),
            ("cycle_first_step_size", "OneCycle: optimizer steps of the rising half"),
            ("cycle_second_step_size", "OneCycle: optimizer steps of the falling half; absent = as many"),
            ("cycle_first_stair_count", "OneCycle: stairs of the rising half, 0 = none"),
            ("cycle_second_stair_count", "OneCycle: stairs of the falling half; absent = as many"),
            ("decay_step_size", "OneCycle: optimizer steps of one decay after the cycle, 0 = no decay"),
            ("cycle_momentum", "OneCycle: move the first beta against the learning rate; the second is 0.99"),
            ("cycle_min_mom", "OneCycle: momentum at the peak of the learning rate"),
            ("cycle_max_mom", "OneCycle: momentum at both ends of the cycle"),
            ("decay_mom_rate", "OneCycle: after the cycle momentum grows by this share, each decay_step_size steps"),
            ("lr_range_test_min_lr", "LRRangeTest: learning rate at the start, or one for each param group"),
            ("lr_range_test_step_size", "LRRangeTest: optimizer steps of one interval"),
            ("lr_range_test_step_rate", "LRRangeTest: what an interval adds, as a share of the first rate"),
            ("lr_range_test_staircase", "LRRangeTest: rise at the end of each interval only"),
        )
    ),
)

TABLES = (LOOP, PRECISION, OPTIMIZER, SCHEDULER)
