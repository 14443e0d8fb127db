"""What tensors are called: all knowledge about names, for all architectures alike (`checkpoint/roles.py`)."""

from trilobite.recipe import Role

GATE, UP, DOWN = (
    r"(?:gate_proj|linear_gate|w1|wi_0)",
    r"(?:up_proj|w3|wi_1|wi|fc1)",
    r"(?:down_proj|w2|wo|fc2)",
)
EXPERT = r"\.experts\.(?:expert_)?\d+\."
SHARED = r"\.shared?_(?:experts?|mlp)\."
MLP = r"\.(?:mlps?(?:\.\d+)?|feed_forward|ffn|DenseReluDense|block_sparse_moe|mixer)\."
# The rest of an attention name must not speak of experts: JetMoE routes between attention heads.
ATTENTION = (
    r"\.(?:self_attn|self_attention|cross_attention|encoder_attn|attention|attn|SelfAttention|EncDecAttention"
    r"|linear_attn|mamba|mamba2|temporal_block)\.(?!.*expert)(?:\w+\.)*"
)
MIXER = r"\.(?:mixer|conv|short_conv|ssm)\."

RULES: tuple[tuple[str, Role, str | None], ...] = (
    # Parts that are kept whole: other modalities, convolutions, states, positions, biases.
    (
        r"^(?:model\.)?(?:encoder\.)?(?:vision|visual|audio|sound|multi_modal|mm_|vit_|sam_|qwen2_model|perception|ctc_|projector"
        r"|patch_merge|pre_mm|embed_vision|embed_audio|mlp1|language_projection|resampler)\w*\.",
        Role.OTHER,
        None,
    ),
    (r"\b\w*conv(?:1d)?\.weight$", Role.OTHER, None),
    (r"\.(?:A_log|D|dt_bias|sinks)$", Role.OTHER, None),
    (r"\.(?:\w+_decay|slope_rate)$", Role.OTHER, None),  # MiniMax's linear attention
    (
        r"[._]hc_\w*fn$|\.\w*ape$|\.index_kpool_compress_\w+$|\.tid2eid$",
        Role.OTHER,
        None,
    ),  # DeepSeek-V4, GLM 5
    (
        r"hyper_connection\w*\.(?:input_mix_weight_\w+|block_inject_weight)\.weight$",
        Role.OTHER,
        None,
    ),  # Qwen 4
    (r"\.self_conditioning\.", Role.OTHER, None),  # DiffusionGemma
    (r"\.attn_res\.|\.\w+_l2_clip\.|\.rel_logits_proj\.|_sconv\.|\.conv_qk_\w+\.", Role.OTHER, None),
    (r"norm\.(?:W_down|W_up|mlp\.fc[12])\.weight$", Role.OTHER, None),  # A.X K2: small gates of norms
    (r"(?:embed_positions|position_embeddings?|wpe|relative_attention_bias)\.weight$", Role.OTHER, None),
    # Routers, with their corrections. Before biases: the bias of a router is the router's.
    (r"(?:e_score_correction_bias|\.expert_bias)$", Role.ROUTER, None),
    (r"\.shared_expert_gate\.weight$", Role.ROUTER, None),
    (r"\.router(?:\.(?:layer|gate|classifier|proj))?\.(?:weight|bias)$", Role.ROUTER, None),
    (r"\.router\.(?:per_expert_)?scale$", Role.ROUTER, None),
    (r"(?:_|\.)bias$", Role.OTHER, None),
    (r"(?:\w*norm\w*|\bln_\w+)\.(?:weight|scale)$", Role.NORM, None),
    (
        r"(?:\.(?:mlp|block_sparse_moe|feed_forward|ffn|mixer|moe)|(?:^|\.)layers\.\d+)\.gate(?:\.wg)?\.weight(?:_1)?$",
        Role.ROUTER,
        None,
    ),
    (r"\.mlp\.gate\.(?:down_proj|router_mlp\.\w+)\.weight$", Role.ROUTER, None),
    # Token mixers: attention of every kind, state-space layers, gated convolutions.
    (ATTENTION + r"(?:q|q_proj|query)\.weight$", Role.ATTENTION, "q"),
    (ATTENTION + r"(?:k|k_proj|key)\.weight$", Role.ATTENTION, "k"),
    (ATTENTION + r"(?:v|v_proj|value)\.weight$", Role.ATTENTION, "v"),
    (ATTENTION + r"(?:o|o_proj|out_proj|dense)\.weight$", Role.ATTENTION, "o"),
    (ATTENTION + r"q_a_proj\.weight$", Role.ATTENTION, "q_a"),
    (ATTENTION + r"q_b_proj\.weight$", Role.ATTENTION, "q_b"),
    (ATTENTION + r"kv_a_proj_with_mqa\.weight$", Role.ATTENTION, "kv_a"),
    (ATTENTION + r"kv_b_proj\.weight$", Role.ATTENTION, "kv_b"),
    (ATTENTION + r"\w+\.weight$", Role.ATTENTION, None),
    (MIXER + r"(?:q|k|v|o|in|out|x|dt)_proj\.weight$", Role.ATTENTION, None),
    # Routed experts, stored one by one.
    (EXPERT + GATE + r"\.weight$", Role.EXPERT, "gate"),
    (EXPERT + UP + r"\.weight$", Role.EXPERT, "up"),
    (EXPERT + DOWN + r"\.weight$", Role.EXPERT, "down"),
    # Routed experts, fused: one tensor a layer, cut by `_cut_experts`.
    (r"\.experts\.gate_up_proj(?:\.weight|_blocks)?$", Role.EXPERT, "gate_up"),
    (r"\.experts\.gate_proj(?:\.weight|_blocks)?$", Role.EXPERT, "gate"),
    (r"\.experts\.up_proj(?:\.weight|_blocks)?$", Role.EXPERT, "up"),
    (r"\.experts\.down_proj(?:\.weight|_blocks)?$", Role.EXPERT, "down"),
    (r"\.experts\.(?:fc1\.weight|w13_weight)$", Role.EXPERT, "gate_up"),
    (r"\.experts\.(?:fc2\.weight|w2_weight)$", Role.EXPERT, "down"),
    (r"\.moe\.gate_proj\.weight$", Role.EXPERT, "gate"),
    (r"\.moe\.up_proj\.weight$", Role.EXPERT, "up"),
    (r"\.moe\.down_proj\.weight$", Role.EXPERT, "down"),
    (r"\.experts\.mlp\.w1$", Role.EXPERT, "gate"),
    (r"\.experts\.mlp\.v1$", Role.EXPERT, "up"),
    (r"\.experts\.mlp\.w2$", Role.EXPERT, "down"),
    (r"\.(?:block_sparse_moe|mlp)\.input_linear\.weight$", Role.EXPERT, "gate_up"),
    (r"\.(?:block_sparse_moe|mlp)\.output_linear\.weight$", Role.EXPERT, "down"),
    (
        r"\.self_attention\.experts\.(?:in|out)put_linear\.weight$",
        Role.OTHER,
        None,
    ),  # JetMoE: between attention heads
    # MLPs that every token passes.
    (SHARED + GATE + r"\.weight$", Role.SHARED_EXPERT, "gate"),
    (SHARED + UP + r"\.weight$", Role.SHARED_EXPERT, "up"),
    (SHARED + DOWN + r"\.weight$", Role.SHARED_EXPERT, "down"),
    (SHARED + r"input_linear\.weight$", Role.SHARED_EXPERT, "gate_up"),
    (SHARED + r"output_linear\.weight$", Role.SHARED_EXPERT, "down"),
    (SHARED + r"gate_up_proj\.weight$", Role.SHARED_EXPERT, "gate_up"),
    (SHARED + r"(?:shared_w\d+_weight|(?:gate|up|down)_proj)$", Role.OTHER, None),  # Inkling: stacked
    (MLP + GATE + r"\.weight$", Role.DENSE_MLP, "gate"),
    (MLP + UP + r"\.weight$", Role.DENSE_MLP, "up"),
    (MLP + DOWN + r"\.weight$", Role.DENSE_MLP, "down"),
    (MLP + r"gate_up_proj\.weight$", Role.DENSE_MLP, "gate_up"),
    (r"\.(?:pre_expert_proj|post_expert_proj|fc[12]_latent_proj)\.weight$", Role.DENSE_MLP, None),
    (r"\.per_layer_(?:input_gate|projection|model_projection)\.weight$", Role.DENSE_MLP, None),  # Gemma
    (r"\.layers\.\d+\.fc1\.weight$", Role.DENSE_MLP, "up"),  # BART, M2M100 and their like
    (r"\.layers\.\d+\.fc2\.weight$", Role.DENSE_MLP, "down"),
    (r"\.ple\.(?:key|value)_proj\.weight$", Role.DENSE_MLP, None),  # Qwen 4
    # Multi-token prediction: joins the next token's embedding to the hidden state.
    (r"(?:\.eh_proj|^mtp\.fc)\.weight$", Role.DENSE_MLP, None),
    # Both ends of the model.
    (
        r"(?:^|\.)(?:embed_tokens(?:_per_layer)?|wte|word_embeddings|tok_embeddings|(?:llm|backbone)\.embed(?:dings)?)\.weight$",
        Role.EMBEDDING,
        None,
    ),
    (r"\.ngram_embedding(?:\.shard_\d+)?\.weight$", Role.EMBEDDING, None),  # Qwen 4
    (r"^(?:model\.)?shared\.weight$", Role.EMBEDDING, None),
    (r"^(?:head|output)\.weight$", Role.HEAD, None),
    (r"(?:^|\.)(?:lm_head|embed_out|shared_head\.head|unembed)\.weight$", Role.HEAD, None),
)
"""Pattern, role and projection; the first that matches decides. Indices of layers and experts are zero."""
