"""The update: samples in, new weights and metrics out. It does not depend on tasks.

Modules in reading order:

    learner      log-probabilities, loss, backward pass, optimizer step, learning-rate schedules
    micro_batch  samples packed into rows without padding, under a token budget
    teacher      models that score the policy's tokens in on-policy distillation
    optimizer    AdamW variants, one of them with its moments in main memory
    sft_learner  the same for supervised fine-tuning
    checkpoint   atomic checkpoint folders with checksums, and optimizer state as tensors
"""
