#!/usr/bin/env bash
# Serve a target with its draft: serve/serve.sh [TARGET] [DRAFT] [options of `dspark serve`]
set -euo pipefail
cd "$(dirname "$0")/.."

target=${1:-smollm2-135m}
draft=${2:-checkpoints/smollm2-135m-dspark-block16}
shift $(($# < 2 ? $# : 2))
python=.venv/bin/python
[ -x "$python" ] || python=python3

exec "$python" -m dspark serve --target "$target" --draft "$draft" "$@"
