#!/usr/bin/env bash
# All that is measured on a GPU machine: benchmarks/gpu.sh OUT [PART...]. Quiet machines only; every part has its own file in OUT.
set -uo pipefail
out=$1 python=${PYTHON:-python3}
shift
here=$(cd "$(dirname "$0")" && pwd)
mkdir -p "$out"
cd "$here/.."
export PYTHONPATH="$PWD/src${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
# The whole takes about ten minutes, of which the last part, which compiles networks, may take half.
parts=("$@")
[ ${#parts[@]} -gt 0 ] || parts=(kernels files plain suite threads fits steps)

# part SECONDS NAME COMMAND: what it prints, for so long at most.
part() {
  local seconds=$1 name=$2
  shift 2
  echo "== $name"
  timeout "$seconds" "$@" 2>&1 | tee "$out/$name.txt" || echo "$name: ended with ${PIPESTATUS[0]}" | tee -a "$out/$name.txt"
}

for name in "${parts[@]}"; do
  case $name in
    kernels) part 240 gpu "$python" benchmarks/gpu.py ;;
    files) part 150 gpu_files "$python" benchmarks/gpu_files.py ;;
    plain) part 120 gpu_without_triton "$python" benchmarks/gpu.py --without-triton ;;
    suite) part 240 suite "$python" -m pytest -q -m cuda -n 8 ;;
    threads) part 240 threads "$python" benchmarks/threads.py ;;
    fits) part 150 gpu_training "$python" benchmarks/gpu_training.py ;;
    steps) part 400 training "$python" benchmarks/training.py ;;
    *) echo "no part $name: kernels files plain suite threads fits steps" >&2; exit 2 ;;
  esac
done
