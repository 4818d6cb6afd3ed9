"""LoRA adapters and quantized weights.

Modules in reading order:

    lora            adds PEFT adapters to a model, and computes the merged weight of a layer
    merge_adapters  merges an adapter into its model and verifies the result
    quantization    bitsandbytes weights, dequantized for each matmul; `groupwise quantize`
"""

import logging

# PEFT loads bitsandbytes, which warns on some CPUs that a kernel is missing that nothing here uses.
logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
