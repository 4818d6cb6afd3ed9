"""A tiny random model of every decoder family in transformers, built from its config class."""

from __future__ import annotations

import random
from typing import Any

import torch
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from groupwise.model.resolve import auto_class
from groupwise.records import Sample

VOCABULARY = 272
LAYERS = 2

SIZES: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "embedding_dim", "lru_width"), 32),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_blocks"), LAYERS),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads"), 2),
    **dict.fromkeys(("head_dim", "kv_channels", "dim_head"), 8),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "ffn_hidden_size", "dff", "dim_ff"), 48),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 16),
    **dict.fromkeys(("shared_intermediate_size", "dense_intermediate_size"), 16),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k"), 2),
    **dict.fromkeys(("n_group", "topk_group", "num_expert_group"), 1),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len", "model_max_length"), 256),
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), VOCABULARY),
    **dict.fromkeys(("kv_lora_rank", "q_lora_rank", "o_lora_rank", "laurel_rank"), 16),
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"), 8),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim", "linear_head_dim"), 8),
    **dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads", "linear_num_heads"), 2),
    **dict.fromkeys(("mamba_d_state", "state_size", "ssm_state_size"), 8),
    **dict.fromkeys(("mamba_chunk_size", "chunk_size"), 8),
    **dict.fromkeys(("resid_pdrop", "embd_pdrop", "emb_pdrop", "dropout", "attention_dropout"), 0.0),
    **dict.fromkeys(("initializer_range", "init_std"), 0.2),
    "first_k_dense_replace": 1,
    "num_dense_layers": 1,
    "sliding_window": 12,
    "hidden_size_per_layer_input": 8,
    "layer_types": None,
    "mlp_layer_types": None,
    "bos_token_id": None,
    "eos_token_id": 268,
    "pad_token_id": 0,
}
"""In the words of all families; a family takes those that its config has."""

LINEAR = ["linear_attention", "full_attention"]
SLIDING = ["sliding_attention", "full_attention"]
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 1}
EXPERTS = {"expert_ffn_hidden_size": 16, "zero_expert_num": 2}
IDS = {"bos_token_id": 1}
INDEX = {"index_n_heads": 2, "index_head_dim": 8, "index_topk": 64}
SPECIAL: dict[str, dict[str, Any]] = {
    "cohere_compass_text": {"layer_types": SLIDING},
    "cwm": {**IDS, "layer_types": SLIDING},
    "dots1": {"layer_types": ["full_attention"] * 2, "n_shared_experts": 1},
    "exaone_moe": {"layer_types": SLIDING},
    "gemma3n_text": {
        "layer_types": [*SLIDING, *SLIDING],
        "num_hidden_layers": 4,
        "num_kv_shared_layers": 2,
        "intermediate_size": 48,
        "activation_sparsity_pattern": [0.0] * 4,
        "altup_num_inputs": 2,
    },
    "gemma4_text": {"layer_types": SLIDING, "global_head_dim": 16, "final_logit_softcapping": 30.0},
    "modernbert-decoder": IDS,
    "ministral": {"layer_types": SLIDING},
    "xlstm": {"num_heads": 4, "chunk_size": 8},
    "zaya": {"num_experts_per_tok": 1, "layer_types": None},
    "bamba": {**MAMBA, "attn_layer_indices": [1]},
    "bailing_hybrid": {"layer_types": LINEAR},
    "bloom": {"num_key_value_heads": None},
    "cohere2": {"layer_types": SLIDING},
    "deepseek_v4": {"o_groups": 2, "index_n_heads": 2, "index_head_dim": 8, "index_topk": 4},
    "deepseek_v32": INDEX,
    "glm_moe_dsa": INDEX,
    "emu3": IDS,
    "exaone4": {"layer_types": SLIDING},
    "falcon_h1": {**MAMBA, "mamba_d_ssm": 64},
    "gemma2": {"layer_types": SLIDING},
    "gemma3": {"layer_types": SLIDING, "query_pre_attn_scalar": 8},
    "gemma3_text": {"layer_types": SLIDING, "query_pre_attn_scalar": 8},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "num_heads": 4, "window_size": 12},
    "gpt_oss": {"layer_types": SLIDING},
    "gptj": {"rotary_dim": 4},
    "codegen": {"rotary_dim": 4},
    "granite": {"logits_scaling": 8.0, "attention_multiplier": 0.3, "residual_multiplier": 0.4},
    "granitemoehybrid": {**MAMBA, "layer_types": ["mamba", "attention"]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_dt_rank": 4},
    "kimi_linear": {"layer_types": LINEAR},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_vl": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "longcat_flash": EXPERTS,
    "mamba2": {"num_heads": 8, "n_groups": 1},
    "minimax": {"layer_types": LINEAR, "block_size": 8},
    "mllama": {**IDS, "cross_attention_layers": []},
    "qwen2_vl": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}},
    "qwen2_5_vl": {
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
    },
    "nemotron_h": {
        "layers_block_type": ["linear_attention", "full_attention", "moe", "mlp"],
        "mamba_num_heads": 8,
        "mamba_head_dim": 8,
        "n_groups": 1,
        "moe_shared_expert_intermediate_size": 16,
    },
    "olmo3": {"layer_types": SLIDING},
    "olmo_hybrid": {"layer_types": LINEAR},
    "qwen3_5": {"layer_types": LINEAR},
    "qwen3_5_text": {"layer_types": LINEAR},
    "qwen3_5_moe": {"layer_types": LINEAR},
    "qwen3_5_moe_text": {"layer_types": LINEAR},
    "qwen3_next": {"layer_types": LINEAR},
    "recurrent_gemma": {"block_types": ["recurrent", "attention"], "attention_window_size": 12},
    "rwkv": {"attention_hidden_size": 32, "context_length": 256},
    "zamba": {
        "layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid"],
        "num_hidden_layers": 4,
        "attention_head_dim": 16,
        "attention_hidden_size": 64,
        "n_mamba_heads": 2,
        "mamba_dt_rank": 4,
    },
    "zamba2": {
        "layers_block_type": ["mamba", "hybrid"],
        "mamba_headdim": 8,
        "n_mamba_heads": 8,
        "adapter_rank": 4,
    },
}
"""What makes a family tiny, or itself: a layer of every kind, and the scales of its published models."""


VISION: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "embed_dim", "intermediate_size", "out_hidden_size"), 32),
    **dict.fromkeys(("num_hidden_layers", "depth", "num_layers"), 1),
    **dict.fromkeys(("num_attention_heads", "num_heads"), 2),
    **dict.fromkeys(("vision_output_dim", "projector_input_dim", "projector_output_dim"), 32),
    "head_dim": 16,
    "image_size": 28,
    "patch_size": 14,
    "num_position_embeddings": 16,
    "position_embedding_size": 16,
    "deepstack_visual_indexes": [0],
    "fullatt_block_indexes": [0],
}
"""The vision part of a vision-language model, which no test computes."""


def tiny_config(family: str) -> Any:
    """Return a config of two or a few narrow layers."""
    kind: Any = CONFIG_MAPPING[family]
    default = kind()
    text = default.get_text_config()
    if text is default:
        return kind(**text_settings(family, default))
    parts = {name: part for name, part in vars(default).items() if hasattr(part, "to_dict")}
    tiny = {
        name: {
            "model_type": part.model_type,
            **(
                text_settings(family, part)
                if part is text
                else {key: value for key, value in VISION.items() if key in part.to_dict()}
            ),
        }
        for name, part in parts.items()
    }
    return kind(**tiny, **({"mm_tokens_per_image": 4} if hasattr(default, "mm_tokens_per_image") else {}))


def text_settings(family: str, config: Any) -> dict[str, Any]:
    known = config.to_dict()
    settings = {name: value for name, value in SIZES.items() if name in known}
    if not known.get("sliding_window"):
        settings.pop("sliding_window", None)
    if "kv_lora_rank" in known:  # multi-head latent attention has as many key heads as query heads
        settings["num_key_value_heads"] = 4
    return settings | SPECIAL.get(family, SPECIAL.get(f"{family}_text", {}))


def tiny_model(family: str) -> Any:
    """Return a random model of a family in float32, the same on every call."""
    config = tiny_config(family)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return auto_class(config).from_config(config).eval()


def ragged_samples() -> list[Sample]:
    """Two groups whose answers differ in length, one of a single token, and reach beyond every window."""
    draw = random.Random(0)
    samples = []
    for group, (prompt, lengths) in enumerate([(14, (1, 5, 12, 12)), (3, (16, 2))]):
        shared = tuple(draw.randrange(3, 260) for _ in range(prompt))
        for length in lengths:
            reply = tuple(draw.randrange(3, 260) for _ in range(length))
            trained = (False,) * prompt + (True,) * length
            zeros = (0.0,) * len(trained)
            samples.append(
                Sample(
                    tokens=shared + reply,
                    trained=trained,
                    logprobs=zeros,
                    entropies=zeros,
                    advantages=zeros,
                    prefix=prompt,
                    group=group,
                )
            )
    return samples
