"""Names of output projections by architecture, and the architectures that store none because it is tied.

Names as they are *stored*, which is not always as transformers' modules are called: published files come from
many programs. Collected from the causal-LM classes of transformers 5.23 and from the headers of published
checkpoints; anything new under ``….lm_head.weight`` is found without a line here.
"""

from __future__ import annotations

#: Output projections, likeliest first. A multimodal or omni wrapper puts a prefix of `WRAPPERS` before it.
HEADS = (
    "lm_head.weight",
    "embed_out.weight",  # GPT-NeoX
    "output.weight",  # Llama's own format, InternLM2
    "output_layer.weight",  # ChatGLM
    "transformer.output_layer.weight",
    "output_projection.weight",  # BioGPT, fairseq
    "head.weight",  # RWKV
    "model.transformer.ff_out.weight",  # OLMo 1 as first released
    "transformer.ff_out.weight",
    "lm_head.decoder.weight",
)

#: Input embeddings, which serve as output projection where the two are tied.
EMBEDDINGS = (
    "model.embed_tokens.weight",
    "model.language_model.embed_tokens.weight",
    "transformer.wte.weight",  # GPT-2 family
    "wte.weight",  # openai-community/gpt2 as stored
    "model.decoder.embed_tokens.weight",  # OPT
    "decoder.embed_tokens.weight",
    "transformer.word_embeddings.weight",  # BLOOM, Falcon
    "word_embeddings.weight",
    "backbone.embeddings.weight",  # Mamba
    "backbone.embedding.weight",
    "gpt_neox.embed_in.weight",
    "embed_tokens.weight",
    "tok_embeddings.weight",  # Llama's own format
    "model.tok_embeddings.weight",
    "transformer.embedding.word_embeddings.weight",  # ChatGLM
    "model.transformer.wte.weight",
    "model.embeddings.weight",
    "model.embeddings.tok_embeddings.weight",
    "biogpt.embed_tokens.weight",
    "rwkv.embeddings.weight",
    "transformer.embeddings.weight",
)

#: Prefixes under which wrappers keep their language model.
WRAPPERS = (
    "",
    "language_model.",
    "model.language_model.",
    "text_model.",
    "model.text_model.",
    "model.",
    "llm.",
    "thinker.",
    "language_model.model.",
)

#: Weights of the final norm, which stands before the output projection, likeliest first; after a wrapper too.
FINAL_NORMS = (
    "model.norm.weight",
    "transformer.ln_f.weight",  # GPT-2 family, Falcon, BLOOM
    "ln_f.weight",
    "gpt_neox.final_layer_norm.weight",
    "model.decoder.final_layer_norm.weight",  # OPT
    "decoder.final_layer_norm.weight",
    "model.final_layernorm.weight",  # Phi, Jamba, Bamba
    "transformer.norm_f.weight",  # MPT
    "backbone.norm_f.weight",  # Mamba
    "model.norm_f.weight",
    "backbone.out_norm.weight",
    "model.embedding_norm.weight",  # LFM2, in spite of its name
    "model.final_norm.weight",
    "transformer.encoder.final_layernorm.weight",  # ChatGLM
    "model.transformer.ln_f.weight",
    "rwkv.ln_out.weight",
    "biogpt.layer_norm.weight",
    "model.layer_norm.weight",
    "norm.weight",  # Llama's own format
)

#: Values of ``model_type`` whose norms store their weight less one: they multiply by 1 + w.
NORMS_LESS_ONE = frozenset(
    [
        *("gemma", "gemma2", "gemma3", "gemma3_text", "recurrent_gemma", "vaultgemma", "nemotron"),
        *("qwen3_next", "qwen3_5", "qwen3_5_moe", "qwen3_5_moe_text", "qwen3_5_text"),
        *("qwen4_exp", "qwen4_exp_text"),
    ]
)
#: Those whose final norm is a LayerNorm without the bias that would show it.
NORMS_OF_MEAN = frozenset(["cohere", "cohere2", "cohere2_moe", "mpt", "dbrx"])
#: Those whose final norm has no weight, and whether it takes the mean.
NORMS_WITHOUT_WEIGHT = {"olmo": True, "nanochat": False}
#: Those whose norms differ by a setting or are built otherwise.
NORMS_UNCLEAR = frozenset(
    ["minimax_m3_vl", "minimax_m3_vl_text", "muse_glimmer", "muse_spark", "step3p7", "hrm_text"]
)

#: Parts of a name that belong to something other than the model's own head or embedding.
NOT_THE_MODEL = (
    "mtp",
    "draft",
    "medusa",
    "eagle",
    "vision",
    "visual",
    "audio",
    "speech",
    "talker",
    "code_predictor",
)

_UNTIED = """
afmoe apertus aquila arcee aria_text axk1 axk2 baichuan bailing_hybrid bamba beam bitnet blt chatglm codegen
cwm dbrx deepseek deepseek_v2 deepseek_v3 deepseek_v32 deepseek_v4 diffllama doge dots1 dots3_note
dots3_note_text emu3 exaone exaone4 exaone_moe falcon_h1 flex_olmo flint fuyu git glm glm4 glm4_moe
glm4_moe_lite glm_moe_dsa gpt_neox gpt_oss gptj granite granitemoe granitemoe_swa granitemoehybrid
granitemoeshared helium hrm_text hunyuan_v1_dense hunyuan_v1_moe hy_v3 hy_v4 hyperclovax inkling2_text
inkling_text internlm internlm2 internlm3 iquestcoder jais2 jamba kimi_linear kolibri1 laguna llama llama4
llama4_text longcat_flash mamba2 mellum mimo_v2_flash minimax minimax_m2 minimax_m3_vl_text ministral
ministral3 mistral mistral3 mixtral mllama moshi nanochat nemotron nemotron_h olmo olmo2 olmo3 olmo_hybrid
olmoe orion persimmon phi phi3 phi3small phi4_multimodal phimoe pixtral qwen qwen2 qwen2_moe qwen3 qwen3_5
qwen3_5_moe qwen3_5_moe_text qwen3_5_text qwen3_moe qwen3_next qwen4_exp qwen4_exp_text reformer rembert
rwkv rwkv5 rwkv6 seed_oss solar_open stablelm stablelm_epoch xlstm xverse yi
"""
#: Values of ``model_type`` whose class does *not* tie when config.json is silent; every other known one does.
UNTIED_BY_DEFAULT = frozenset(_UNTIED.split())
