#!/usr/bin/env bash
# From responses to a measured draft: train -> export (with its check) -> evaluate.
# Interrupted at any point it goes on where it stopped.
#
#   train/distill.sh [CONFIG] [key.sub=value ...]
#
# LAUNCH is how processes start (default: accelerate launch), PROMPTS what is evaluated on, EXPORT and
# EVAL are further options of those two commands, such as EXPORT=--no-check EVAL="--limit 4".
set -euo pipefail
cd "$(dirname "$0")/.."

CONFIG=${1:-configs/smollm2-135m-dspark.yaml}
shift || true
PYTHON=${PYTHON:-python}
LAUNCH=${LAUNCH:-$PYTHON -m accelerate.commands.launch}
PROMPTS=${PROMPTS:-data/prompts/heldout.jsonl}
export PYTHONPATH=${PYTHONPATH:-.}

SETTINGS=$("$PYTHON" -m dspark.config_io "$CONFIG" target.path train.output_dir -- "$@")
{ read -r TARGET; read -r RUN; } <<<"$SETTINGS"

# 1. Distil. One process unless LAUNCH says otherwise (train/README.md).
# shellcheck disable=SC2086 # LAUNCH is a command with arguments
$LAUNCH train.py --config "$CONFIG" "$@"

# 2. Export the best checkpoint; it is decoded again by a clean process.
# shellcheck disable=SC2086 # EXPORT and EVAL are lists of options
"$PYTHON" -m dspark export "$RUN" "$RUN/draft" --target "$TARGET" --overwrite ${EXPORT:-}

# 3. Accept length on prompts that were not trained on, beside plain decoding.
# shellcheck disable=SC2086
"$PYTHON" -m dspark eval --target "$TARGET" --draft "$RUN/draft" --prompts "$PROMPTS" ${EVAL:-}
