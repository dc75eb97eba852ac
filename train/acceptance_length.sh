#!/usr/bin/env bash
# One arm of the acceptance-length study: train it, then judge it on known outputs of the target.
#
#   train/acceptance_length.sh ARM [SEED] [key.sub=value ...]
#
# Needs $OUT/responses.jsonl (data/build_corpus.sh) and $OUT/outputs.json (benchmarks/study/outputs.py).
# Arms: benchmarks/study/arms.py. STEPS of each; rows are appended to $RAW. A GPU: a minute or two an arm.
set -euo pipefail
cd "$(dirname "$0")/.."

ARM=${1:?an arm of benchmarks/study/arms.py}
SEED=${2:-0}
shift $(($# > 1 ? 2 : 1))
OUT=${OUT:-outputs/corpus}
RUNS=${RUNS:-outputs/study}
RAW=${RAW:-$RUNS/rows.jsonl}
STEPS=${STEPS:-1200}
PYTHON=${PYTHON:-python}
export PYTHONPATH=${PYTHONPATH:-.}

SETTINGS=$("$PYTHON" benchmarks/study/arms.py "$ARM")
# shellcheck disable=SC2086 # settings are a list
"$PYTHON" train.py --config configs/smollm2-135m-study.yaml data.responses="[$OUT/responses.jsonl]" \
    train.steps="$STEPS" train.seed="$SEED" train.output_dir="$RUNS/$ARM-$SEED" $SETTINGS "$@"
"$PYTHON" benchmarks/study/score.py --outputs "$OUT/outputs.json" --out "$RAW" "$RUNS/$ARM-$SEED"
