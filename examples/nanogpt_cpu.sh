#!/usr/bin/env bash
# nanoGPT's CPU recipe (its README: validation loss 1.88) across three PNodes on this machine, seeds 1, 2 and 3.
#
#   examples/nanogpt_cpu.sh path/to/tinyshakespeare.txt
#
# gpt-char's own defaults are the recipe: 4 layers, 4 heads, 128 wide, context 64, batch 12, 2000 steps, AdamW with betas
# 0.9 and 0.99, weight decay 0.1, lr 1e-3 with 100 steps of warm-up and a cosine to 1e-4, clip 1.0, no dropout.
# Prints the loss over the whole validation split for each seed. Uses a cluster and home of its own and ends it.
set -euo pipefail
text=${1:?path to tinyshakespeare.txt}
export DCNR_HOME
DCNR_HOME=$(mktemp -d)
trap 'dcnr down; rm -rf "$DCNR_HOME"' EXIT
dcnr up --pnodes 3
for seed in 1 2 3; do
    dcnr train gpt-char --data "$text" --pnodes 3 --seed "$seed" --name "seed-$seed" --every 30
    dcnr eval "seed-$seed"
done
