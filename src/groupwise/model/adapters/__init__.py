"""Adapters and quantized weights.

Modules in reading order:

    lora            put PEFT adapters on a model; the weight that a layer with an adapter amounts to
    lora_bank       several adapters of one policy, one of them active
    merge_adapters  add adapters into their model, verified
    quantization    bitsandbytes weights, unpacked for each product; `groupwise quantize`
"""
