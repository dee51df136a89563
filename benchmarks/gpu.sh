#!/usr/bin/env bash
# Everything that needs a GPU, in one go: nothing is downloaded or installed, and the python3 and torch that are there are
# used. A step that fails does not stop the others; the table at the end, and the exit code, say which did.
# benchmarks/gpu.sh [STEP] runs one of: build info cpu-tests gradcheck track prediction profile.
set -uo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
results=benchmarks/results/gpu

step_build() { MEMCHECK_CUDA=1 "$python" setup.py build_ext --inplace; }
step_info() { "$python" -m memcheck info; }
step_cpu-tests() { "$python" -m pytest tests/ops; }
step_gradcheck() { "$python" -m memcheck.gradcheck; }
step_track() { "$python" -m pytest tests/gpu --ignore tests/gpu/test_prediction_cuda.py; }
step_prediction() { "$python" -m pytest tests/gpu/test_prediction_cuda.py; }
step_profile() { "$python" -m memcheck.profile_attention --device cuda --output "$results/profile"; }

steps=(build info cpu-tests gradcheck track prediction profile)
if [ $# -gt 0 ]; then
    if [[ " ${steps[*]} " != *" $1 "* ]]; then
        echo "there is no step '$1', only ${steps[*]}" >&2
        exit 2
    fi
    steps=("$1")
fi
if ! machine=$(nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader 2>/dev/null); then
    echo "no GPU here: nvidia-smi names none" >&2
    exit 1
fi

mkdir -p "$results"
{
    echo "GPU, driver, memory: $machine"
    "$python" -c 'import platform, torch; print("Python", platform.python_version(), "torch", torch.__version__)'
    date -u +%Y-%m-%d
} >"$results/machine.txt"

failed=0
table=""
for step in "${steps[@]}"; do
    echo "== $step"
    started=$SECONDS
    if "step_$step" 2>&1 | tee "$results/$step.log"; then
        outcome=passed
    else
        outcome=FAILED
        failed=1
    fi
    table+=$(printf '%-10s %-7s %5d s' "$step" "$outcome" $((SECONDS - started)))$'\n'
done
echo "== $machine"
printf '%s' "$table" | tee "$results/steps.txt"
exit $failed
