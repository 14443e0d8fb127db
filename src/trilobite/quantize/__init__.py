"""Make packed weights: one matrix in, one packed weight out; and the run that does so for a whole checkpoint.

A run            compress: from a checkpoint to a packed one         options: how    identity: what it may continue
                 plan, ranks: a recipe becomes a line for every tensor
                 work, threads: lines side by side within the memory bound    line: one of them
                 metadata, report: what it leaves, what that comes to         stats: matrices before any of it
A matrix         matrix: bands of rows, by rtn, search or hqq                  ldlq: lattice codes    gptq: feedback
                 milo: with a low-rank compensator (lowrank, compensator)      hessian: what counts in its inputs
Calibration      calibration: the text, cut into windows                      calibrated: what has to run for it
                 calibration_weights, _model: the original model, block by block    stacked_experts: of one layer
                 calibration_loop, _watch, _experts: Hessians as it runs, handed to a receiver
                 calibrated_work: the receiver that packs             calibration_store: the one that keeps them
Fine-tuning      finetune: training    finetune_part: a block as a function of what is trained    finetune_store
"""
