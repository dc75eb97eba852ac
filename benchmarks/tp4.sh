#!/usr/bin/env bash
# The published table on four GPUs of one host (benchmarks/tp4.py); made to take 8 minutes, not run yet.
#
#   benchmarks/tp4.sh                   --ranks 2: on two; --dry-run: what it would run
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHONPATH=${PYTHONPATH:-.} exec "${PYTHON:-python}" benchmarks/tp4.py "$@"
