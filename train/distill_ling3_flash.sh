#!/usr/bin/env bash
# From Ling-3.0-flash's own answers to a draft of it, set beside the official one:
# prompts -> responses -> training with the target in processes of its own (split) -> export -> comparison.
# Interrupted at any point it goes on where it stopped.
#
#   train/distill_ling3_flash.sh [CONFIG] [key.sub=value ...]
#
# OFFICIAL is the other draft's directory (inclusionAI/Ling-3.0-flash-dspark, downloaded), ENDPOINT a server that
# answers the prompts (…/v1 of SGLang, vLLM or `dspark serve`; without one the target does it in this process), OUT where
# the corpus goes, COUNT and SETS which prompts (data/build_corpus.sh), EVAL_PROMPTS what is evaluated on, EVAL further
# options of that. LAUNCH starts the training. TARGET_DEVICE is where export and evaluation put the target.
set -euo pipefail
cd "$(dirname "$0")/.."

CONFIG=${1:-configs/ling-3.0-flash-dspark.yaml}
shift || true
export PYTHON=${PYTHON:-python}
export OUT=${OUT:-outputs/ling}
LAUNCH=${LAUNCH:-$PYTHON -m accelerate.commands.launch --config_file configs/accelerate/zero2.yaml --num_processes 2}
TARGET_DEVICE=${TARGET_DEVICE:-cuda:0+cuda:1+cuda:2}

if [ -n "${OFFICIAL:-}" ] && [ ! -e "$OFFICIAL/config.json" ]; then
    echo "OFFICIAL is '$OFFICIAL', which holds no config.json: give the directory of a downloaded draft" >&2
    exit 2
fi

# 1. What it answers. The same settings as in training, so that both read one config.
data/build_corpus.sh "$CONFIG" ${ENDPOINT:+sample.endpoint="$ENDPOINT"} "$@"

# 2. Train, export, and compare. The check of the export would need room for a second target: the comparison says
#    whether the output is the target's.
LAUNCH=$LAUNCH \
PROMPTS=${EVAL_PROMPTS:-data/prompts/heldout.jsonl} \
EXPORT="--no-check --device $TARGET_DEVICE" \
EVAL="${OFFICIAL:+--draft $OFFICIAL --base $OFFICIAL }target.device=$TARGET_DEVICE ${EVAL:-}" \
    train/distill.sh "$CONFIG" data.responses="[$OUT/responses.jsonl]" "$@"
