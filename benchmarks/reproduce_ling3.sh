#!/usr/bin/env bash
# What is published of Ling-3.0-flash and its draft, measured here with the real weights (benchmarks/reproduce_ling3.py).
#
#   benchmarks/reproduce_ling3.sh MODEL DRAFT            --ranks 2: on two GPUs
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHONPATH=${PYTHONPATH:-.} exec "${PYTHON:-python}" benchmarks/reproduce_ling3.py "$@"
