"""Configurations of Transformers made so small that a model of any architecture has some thousand parameters."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any, Final

WORDS: Final = 99
"""Of every vocabulary."""
SIDE: Final = 32
"""Pixels of an image."""
PATCH: Final = 8

Rules = Mapping[str, int]
LAYERS: Final = r"(num_)?(\w*_)?(hidden_)?(layers?|blocks)"
HEADS: Final = r"(num_)?(\w*_)?(attention_|self_|cross_)?heads?|n_heads?|num_\w*heads"
RULES: Final[Rules] = {
    LAYERS: 2,
    r"n_layers?|depth|num_layers?_\w+|num_stacks": 2,
    r"depths|num_layers_per_stage|num_blocks": 1,
    r"(\w+_)?vocab(ulary)?_size(_\w+)?": WORDS,
    r"(\w+_)?(hidden_sizes?|hidden_dim|d_model|n_embd|embed_dim|embedding_dim|model_dim|hidden_channels)|dim|emb_dim|"
    r"embedding_size|embedding_hidden_size|word_embed_proj_dim|projection_dim|out_hidden_size|d_embed|lru_width|"
    r"projection_hidden_size|decoder_hidden_dim|conv_dim|feature_size|fpn_feature_size|mask_feature_size|"
    r"embed_dims|encoder_hidden_dim|neck_hidden_sizes|reassemble_hidden_size|out_channels|output_channels|"
    r"output_dim|num_fpn_filters|prompt_embed_dim|block_channels|z_channels|codebook_dim": 32,
    HEADS: 4,
    r"(\w+_)?(num_key_value_heads|num_kv_heads|n_kv_heads|multi_query_group_num)": 2,
    r"head_dim|attention_head_size|d_kv|global_head_dim|kv_channels|v_head_dim|qk_nope_head_dim|d_head|"
    r"\w+_head_dim": 8,
    r"qk_rope_head_dim": 8,
    r"(\w+_)?(intermediate_size|intermediate_dim|ffn_dim|ffn_size|d_ff|dim_ff|d_inner|n_inner|ffn_hidden_size|mlp_dim|"
    r"ffn_intermediate_size|feed_forward_size|dim_feedforward)(_\w+)?": 48,
    r"(\w*_)?moe_intermediate_size|shared_expert_intermediate_size|expert_ffn_size": 16,
    r"(num_|n_)?(\w*_)?experts|num_routed_experts|moe_num_experts|n_routed_experts": 4,
    r"num_experts_per_to(k|ken)|top_k|moe_topk|moe_k|num_selected_experts|experts_per_token|topk": 2,
    r"n_shared_experts|n_group|topk_group|first_k_dense_replace": 1,
    r"q_lora_rank|kv_lora_rank|index_topk|o_lora_rank": 16,
    r"index_n_heads": 2,
    r"index_head_dim": 16,
    r"(\w+_)?max_(\w+_)?positions?(_embeddings)?|n_positions|n_ctx|seq_length|max_seq_len|context_length|"
    r"max_sequence_length|text_len|max_length|max_context_len": 64,
    r"(\w+_)?image_size|img_size|crop_size|resolution|pretrained_image_size": SIDE,
    r"(\w+_)?patch_size": PATCH,
    r"num_mel_bins|input_feat_per_channel|n_mels|num_mels": 16,
    r"state_size|mamba_d_state|ssm_state_size|time_step_rank|d_state|mamba_dt_rank": 8,
    r"num_queries|num_query_tokens|num_latents|num_image_tokens|image_seq_length": 8,
    r"d_latents": 32,
    r"sampling_ratio|train_num_points": 16,
    r"sliding_window|attention_window|local_attention|window_size|attention_chunk_size|chunk_length": 4,
    r"num_labels": 2,
}
"""What a field whose name matches is set to; of a list each entry. Later rules win."""

DEEPER: Final[Rules] = {**RULES, LAYERS: 8}
"""Where the first layers are of one kind and later ones of another."""
WIDER: Final[Rules] = {
    pattern: 2 if pattern == HEADS else 128 if value == 32 else value
    for pattern, value in RULES.items()
    if "head_dim" not in pattern
}
"""Where heads are as wide as they are."""
AS_IT_IS: Final[Rules] = {
    pattern: value for pattern, value in RULES.items() if "window_size" not in pattern and "heads?" not in pattern
}
"""Where heads and windows must fit."""
VARIANTS: Final = (RULES, DEEPER, WIDER, AS_IT_IS)


def _ruled(name: str, default: Any, rules: Rules) -> Any:
    """The value that rules give a field; its default where none does."""
    found = [value for pattern, value in rules.items() if re.fullmatch(pattern, name)]
    if not found or isinstance(default, bool):
        return default
    if isinstance(default, int):
        return min(default, found[-1]) if default > 0 else default
    if isinstance(default, (list, tuple)) and all(type(each) is int for each in default):
        return type(default)(min(each, found[-1]) if each > 0 else each for each in default)
    return default


def settings(kind: type, rules: Rules) -> dict[str, Any]:
    """Arguments for a configuration class under which its models are small."""
    default = kind()
    chosen: dict[str, Any] = {}
    parts: Mapping[str, Any] = getattr(kind, "sub_configs", {})
    for field in dataclasses.fields(kind):
        raw = field.default
        if field.default_factory is not dataclasses.MISSING:
            raw = field.default_factory()
        if field.name in parts:
            part: Any = getattr(default, field.name, None)
            if part is not None:
                chosen[field.name] = {**settings(type(part), rules), "model_type": part.model_type}
            continue
        if raw is dataclasses.MISSING or field.name.startswith("_"):
            continue
        value = _ruled(field.name, raw, rules)
        if field.name.endswith(("token_id", "token_index")):
            value = _token(field.name, raw)
        if value is not raw and value != raw:
            chosen[field.name] = value
    return chosen


def _token(name: str, raw: Any) -> Any:
    """A word of the small vocabulary, other for other names."""
    if isinstance(raw, int) and not isinstance(raw, bool) and raw >= WORDS:
        return WORDS - 1 - sum(map(ord, name)) % 40
    if isinstance(raw, list):
        return [_token(name, each) for each in raw]
    return raw


def small(kind: type[Any], rules: Rules) -> Any:
    """A small configuration of a class."""
    return kind(**settings(kind, rules))
