#!/usr/bin/env bash
# From responses to a measured draft: train -> export (with its check) -> evaluate.
# Interrupted at any point it goes on where it stopped.
#
#   train/distill.sh [CONFIG] [key.sub=value ...]
#
# LAUNCH is how processes start (default: accelerate launch), PROMPTS what is evaluated on.
set -euo pipefail
cd "$(dirname "$0")/.."

CONFIG=${1:-configs/smollm2-135m-dspark.yaml}
shift || true
PYTHON=${PYTHON:-python}
LAUNCH=${LAUNCH:-$PYTHON -m accelerate.commands.launch}
PROMPTS=${PROMPTS:-data/prompts/heldout.jsonl}
export PYTHONPATH=${PYTHONPATH:-.}

read -r TARGET RUN < <("$PYTHON" -c 'import sys; from dspark.config_io import load
c = load(sys.argv[1], sys.argv[2:]); print(c.target.path, c.train.output_dir)' "$CONFIG" "$@")

# 1. Distil. One process unless LAUNCH says otherwise (train/README.md).
# shellcheck disable=SC2086 # LAUNCH is a command with arguments
$LAUNCH train.py --config "$CONFIG" "$@"

# 2. Export the best checkpoint; it is decoded again by a clean process.
"$PYTHON" -m dspark export "$RUN" "$RUN/draft" --target "$TARGET" --overwrite

# 3. Accept length on prompts that were not trained on, beside plain decoding.
"$PYTHON" -m dspark eval --target "$TARGET" --draft "$RUN/draft" --prompts "$PROMPTS"
