"""Make packed weights: one matrix in, one packed weight out; and the run that does so for a whole checkpoint.

run/         compress: from a checkpoint to a packed one      options: how      identity: what it may continue
             work: lines side by side    executor: by whom    lines: read and quantize one
             calibrated: those that need Hessians    guessed: importance without a run of the model
             planned: from a budget to a recipe    sensitivity    metadata: what it leaves
methods/     registry: METHODS[name](w, fmt, hessian=…, compensation=…) -> Quantized
             bands: of rows, by rtn, search or hqq    ldlq: lattice codes    gptq: feedback    descent: after it
             hessian: what counts
             milo: codes and a low-rank compensator in turn (lowrank, compensator)
plan/        plan, ranks: a recipe becomes a line for every tensor    report: what that comes to    statistics
budget/      choose: the recipe that loses least within a bound (units, loss, priors, solve), as rules, and an account
             sensitivity: what errors in each unit cost
columns/     choose: the checkpoint with column scales    streams: who reads and writes a vector    find    rescaling
             guess: importance as weights tell it
calibrate/   windows: the text, cut    model, weights: the original model, block by block    stacked_experts
             loop, watch, routed: Hessians as it runs    protocols: who takes them    store: a folder that keeps them
             builtin: a text of ours, for importance    sampled: one by the model itself    diagonals: importance alone
finetune/    train    part: a block as a function of what is trained    store

Follow a Hessian: the text (calibrate/windows) -> the model's inputs, summed (calibrate/loop; of experts: routed) ->
lines that share it (run/work) -> codes (methods/gptq, methods/ldlq).
"""
