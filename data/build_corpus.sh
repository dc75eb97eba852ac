#!/usr/bin/env bash
# The corpus of a distillation, stage by stage: prompts -> responses -> examination -> features.
# Every stage may be stopped and started again; what is there is kept.
#
#   data/build_corpus.sh [CONFIG] [key.sub=value ...]
#
# COUNT prompts (default 20000) go to $OUT/prompts-COUNT.jsonl, or, with SETS (names of public sets, files,
# globs), to $OUT/prompts-COUNT/. EXCLUDE names evaluation files whose text must not be trained on, WHEELS a
# folder of downloaded wheels (data/README.md).
set -euo pipefail
cd "$(dirname "$0")/.."

CONFIG=${1:-configs/smollm2-135m-dspark.yaml}
shift || true
OUT=${OUT:-outputs/corpus}
PYTHON=${PYTHON:-python}
export PYTHONPATH=${PYTHONPATH:-.}

# A mistake in the settings is told before anything is built.
TARGET=$("$PYTHON" -m dspark.config_io "$CONFIG" target.path -- "$@")
COUNT=${COUNT:-20000}
PROMPTS=$OUT/prompts-$COUNT.jsonl

# 1. Prompts: generated, plus Python's own library, or those of SETS; the held-out prompts are kept out.
if [ -n "${SETS:-}" ]; then
    set -f # dspark expands the globs
    # shellcheck disable=SC2086 # SETS and EXCLUDE are lists
    "$PYTHON" -m dspark prepare $SETS --out "$OUT/prompts-$COUNT" --limit "$COUNT" \
        --exclude data/prompts/heldout.jsonl ${EXCLUDE:-}
    set +f
    PROMPTS=$OUT/prompts-$COUNT/train.jsonl
elif [ ! -e "$PROMPTS" ]; then
    # shellcheck disable=SC2086 # EXCLUDE is a list of globs
    "$PYTHON" data/build_prompts.py --out "$PROMPTS" --count "$COUNT" --seed 0 \
        --stdlib ${WHEELS:+--wheels "$WHEELS"} --exclude data/prompts/heldout.jsonl ${EXCLUDE:-}
fi

# 2. Responses of the target, with the sampling settings of the config. The long stage: on a GPU.
"$PYTHON" -m dspark sample -c "$CONFIG" sample.prompts="[$PROMPTS]" \
    sample.out="$OUT/responses.jsonl" "$@"

# 3. What is wrong with them, before any GPU hour is spent on training.
"$PYTHON" -m dspark doctor "$OUT/responses.jsonl" --target "$TARGET"

# 4. Features to disk, only for `train.features: offline`. It says how much it will write.
if [ -n "${CAPTURE:-}" ]; then
    "$PYTHON" -m dspark capture -c "$CONFIG" data.responses="[$OUT/responses.jsonl]" \
        capture.out="$OUT/features" "$@"
fi

echo "corpus: $OUT/responses.jsonl; train with data.responses=[$OUT/responses.jsonl]"
