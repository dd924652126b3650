#!/usr/bin/env bash
# All recipes side by side on one GPU: reproduce/all.sh DATA OUT [MINUTES] [RESULTS]. Again until nothing is left.
# Numbers go to RESULTS/<recipe>, by default to reproduce/<recipe>/results, which RESULTS may be a copy of.
set -eu
data=$1 out=$2 minutes=${3:-9} results=${4:-}
here=$(cd "$(dirname "$0")" && pwd)
python=${PYTHON:-python3}
end=$(($(date +%s) + 60 * minutes))
mkdir -p "$out/logs"
# Networks of this size leave most of a GPU idle: with CUDA's service their kernels run at the same time.
export CUDA_MPS_PIPE_DIRECTORY="$out/mps" CUDA_MPS_LOG_DIRECTORY="$out/mps"
mkdir -p "$out/mps" && nvidia-cuda-mps-control -d || true
# Beside other processes more threads only wait for each other.
export NUMBA_NUM_THREADS=2 OPENBLAS_NUM_THREADS=2 PYTHONUNBUFFERED=1

folder() { if [ -n "$results" ]; then echo "$results/$1"; else echo "$here/$1/results"; fi; }

# step RECIPE SCRIPT LOG ARGUMENTS: one script of a recipe, for the minutes that are left.
step() {
  local recipe=$1 script=$2 log=$3 left
  shift 3
  left=$("$python" -c "import time; print(max(0.1, ($end - time.time()) / 60))")
  "$python" "$here/$recipe/$script" "$data" "$out/$recipe" --minutes "$left" \
    --results "$(folder "$recipe")" "$@" >>"$out/logs/$log" 2>&1
}

(step camvid run.py camvid.log --parallel 8 --compile
  step camvid posthoc.py camvid.log --tables selective rethinking --parallel 4 &
  step camvid posthoc.py camvid-lts.log --tables lts lts-unet --parallel 3
  wait) &
(step hippocampus run.py hippocampus.log --parallel 3) &
(step acdc run.py acdc.log --parallel 5 --compile
  step acdc posthoc.py acdc.log --parallel 3) &
wait
tail -n 2 "$out"/logs/*.log
