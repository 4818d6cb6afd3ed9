"""The update: samples in, new weights and a report out. It knows no tasks.

Modules in reading order:

    learner      log-probabilities, loss, backward, optimizer step
    micro_batch  samples packed into rows without padding, under a token budget
    optimizer    AdamW variants, offload to the CPU, learning-rate schedules
    sft_learner  the same for supervised steps
    checkpoint   folders that are complete or absent, with checksums
"""
