#!/usr/bin/env bash
# Searches one real shape on whatever is there, shows what was found and where it lies.
# Usage: scripts/demo.sh FOLDER, where FOLDER holds the commands python and flashtune
set -euo pipefail

bin=$1
kernel=out/demo_kernel.py
# Candidates to compile where there is no GPU: about a minute on two cores.
trials=${DEMO_TRIALS:-24}
# Llama 3.1 8B's attention over a prompt of 4096 tokens.
shape="heads=32,kv_heads=8,seqlen=4096,head_dim=128,dtype=bf16,causal"

flashtune() {
    local word line=""
    for word; do
        [[ $word == *=* ]] && word="\"$word\""
        line+=" $word"
    done
    printf '\n$ flashtune%s\n' "$line"
    "$bin/flashtune" "$@"
}

if "$bin/python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
    where=()
    flashtune search --shape "$shape"
else
    echo "There is no GPU here: working for an H100. Kernels are compiled for it; their times are predicted."
    where=(--target h100)
    flashtune search --shape "$shape" "${where[@]}" --trials "$trials"
fi

flashtune show "${where[@]}"
flashtune explain --shape "$shape" "${where[@]}"
flashtune render --shape "$shape" "${where[@]}" --out "$kernel"

if [[ ${#where[@]} -eq 0 ]]; then
    printf '\n$ python -c "...flashtune.attention(q, k, v, causal=True)..."\n'
    "$bin/python" - <<'PYTHON'
import torch

import flashtune

q = torch.randn(1, 32, 4096, 128, dtype=torch.bfloat16, device="cuda")
k, v = (torch.randn(1, 8, 4096, 128, dtype=torch.bfloat16, device="cuda") for _ in range(2))
out = flashtune.attention(q, k, v, causal=True, prefer="generated")
expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
print(f"largest difference from torch's attention: {(out - expected).abs().max().item():.4f}")
PYTHON
fi

printf '\nThe rendered kernel:  %s\n' "$kernel"
printf 'The database:         %s\n' "$("$bin/flashtune" db path)"
