"""Write the local config folders (config.json only; dummy weights) used by the peer benchmark."""

import json
import os
import sys

out = sys.argv[1] if len(sys.argv) > 1 else "peer_configs"
ROPE = {
    "factor": 8.0,
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}


def llama(**kw):
    c = dict(
        architectures=["LlamaForCausalLM"],
        model_type="llama",
        attention_bias=False,
        attention_dropout=0.0,
        bos_token_id=128000,
        eos_token_id=128009,
        hidden_act="silu",
        hidden_size=4096,
        initializer_range=0.02,
        intermediate_size=14336,
        max_position_embeddings=131072,
        mlp_bias=False,
        num_attention_heads=32,
        head_dim=128,
        num_hidden_layers=32,
        num_key_value_heads=8,
        pretraining_tp=1,
        rms_norm_eps=1e-5,
        rope_scaling=ROPE,
        rope_theta=500000.0,
        tie_word_embeddings=False,
        torch_dtype="bfloat16",
        use_cache=True,
        vocab_size=128256,
    )
    c.update(kw)
    return c


def dflash(nt, **kw):
    c = dict(
        architectures=["DFlashDraftModel"],
        model_type="qwen3",
        attention_bias=False,
        attention_dropout=0.0,
        bos_token_id=128000,
        eos_token_id=128009,
        hidden_act="silu",
        hidden_size=4096,
        intermediate_size=14336,
        num_attention_heads=32,
        head_dim=128,
        num_key_value_heads=8,
        num_hidden_layers=5,
        num_target_layers=nt,
        block_size=16,
        max_position_embeddings=131072,
        rms_norm_eps=1e-6,
        rope_theta=500000.0,
        tie_word_embeddings=False,
        torch_dtype="bfloat16",
        vocab_size=128256,
        dflash_config=dict(mask_token_id=128002),
    )
    c.update(kw)
    return c


CFG = {
    "target8b": llama(),
    "tiny": llama(num_hidden_layers=8),
    "eagle3": llama(architectures=["LlamaForCausalLMEagle3"], num_hidden_layers=1, draft_vocab_size=32000),
    "eagle2": llama(architectures=["LlamaForCausalLMEagle"], num_hidden_layers=1),
    "draft1b": llama(
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=16,
        head_dim=64,
        tie_word_embeddings=True,
        rope_scaling=dict(ROPE, factor=32.0),
    ),
    "dflash": dflash(32),
    "dflash_tiny": dflash(8),
}
for n, c in CFG.items():
    os.makedirs(f"{out}/{n}", exist_ok=True)
    json.dump(c, open(f"{out}/{n}/config.json", "w"), indent=1)
print("configs in", out)
