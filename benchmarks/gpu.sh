#!/usr/bin/env bash
# Runs everything that needs a GPU, with the installed python3 and torch; it downloads and installs nothing. A failed step
# does not stop the others: the table at the end lists failed steps, and the exit code is 1. Each step takes at most ten
# minutes on an H200.
# benchmarks/gpu.sh [STEP ...] runs only these steps:
#   build      builds the extension, with nvcc for its kernels
#   info       memcheck info: the build and the machine
#   ptx        inline PTX instructions, compared with their host implementations
#   values     tests/ops with tensors on the GPU: values, gradients, layouts, bytes, opcheck, torch.compile
#   operators  tests/gpu: streams, CUDA graphs, peaks, large tensors; timelines and statistics of CUDA memory
#   prediction  predicted bytes, compared with those of the caching allocator
#   snapshot   memcheck run --snapshot, replayed by the allocator's model and compared with torch's statistics
#   gradcheck  gradients, compared with central differences in float64
#   sanitizer  compute-sanitizer on every operator: memcheck and racecheck
#   counts     what the host counts of the kernels, compared with Nsight Compute, and derived times with measured ones
#   bench      every operator, compared with its alternatives: bench.md, bench.json
#   profile    the profiles of attentions and of a whole model
# Logs and results go to MEMCHECK_RESULTS, by default benchmarks/results/gpu.
set -uo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
export MEMCHECK_RESULTS=${MEMCHECK_RESULTS:-benchmarks/results/gpu}
results=$MEMCHECK_RESULTS
# Scripts in other folders import memcheck from here; it need not be installed.
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
# Without it torch warns at every product that its bits may change from run to run, because tests turn this warning on.
export CUBLAS_WORKSPACE_CONFIG=${CUBLAS_WORKSPACE_CONFIG:-:4096:8}

run_pytest() {
    local workers=()
    if "$python" -c 'import xdist' 2>/dev/null; then workers=(--numprocesses 8 --dist worksteal); fi
    "$python" -m pytest -q "${workers[@]}" "$@"
}

# Some toolchains link libstdc++ statically. A module with a copy of it crashes where it raises an error of torch.
step_build() {
    LDFLAGS="-Wl,--no-as-needed,-l:libstdc++.so.6,--as-needed ${LDFLAGS-}" MEMCHECK_CUDA=1 "$python" setup.py build_ext --inplace
}
step_info() { "$python" -m memcheck info; }
step_ptx() { "$python" -m pytest -q tests/gpu/test_ptx_cuda.py; }
step_values() { run_pytest tests/ops --device cuda -m "not cpu"; }
# In one process, because large tensors take most of the memory.
step_operators() {
    "$python" -m pytest -q tests/gpu --ignore tests/gpu/test_ptx_cuda.py --ignore tests/gpu/test_prediction_cuda.py \
        --ignore tests/gpu/test_models_cuda.py --ignore tests/gpu/test_snapshot_cuda.py
}
step_prediction() { "$python" -m pytest -q tests/gpu/test_prediction_cuda.py tests/gpu/test_models_cuda.py; }
step_snapshot() { "$python" -m pytest -q tests/gpu/test_snapshot_cuda.py; }
step_gradcheck() { "$python" -m memcheck.gradcheck --device cuda; }
step_counts() { "$python" benchmarks/gpu_counts.py; }
step_bench() { "$python" benchmarks/gpu.py; }
step_profile() {
    "$python" -m memcheck.profile_attention --device cuda --output "$results/profile" || return
    "$python" -m memcheck.profile_model --device cuda --size small --context 512 --bsz 8 --dtype fp32,bf16 \
        --attention-type naive,softmax,linear,compressed,softplus --output "$results/model"
}

step_sanitizer() {
    local sanitizer said status=0
    if ! sanitizer=$(command -v compute-sanitizer); then
        echo "skipped: compute-sanitizer is not on PATH"
        return 0
    fi
    # The caching allocator divides its blocks, so that an access beyond one tensor would be inside another.
    export PYTORCH_NO_CUDA_MEMORY_CACHING=1
    said=$("$sanitizer" --error-exitcode 9 "$python" -c 'import torch; torch.zeros(1, device="cuda").item()' 2>&1)
    if [ $? -ne 0 ]; then
        echo "skipped: compute-sanitizer does not run here: $(tail -n 3 <<<"$said" | tr '\n' ' ')"
        return 0
    fi
    for tool in memcheck racecheck; do
        echo "-- $tool"
        "$sanitizer" --tool $tool --kernel-regex kns=memcheck --error-exitcode 9 \
            "$python" tests/gpu/small_operators.py || status=1
    done
    return $status
}

# Runs a step in its own process, which `timeout` can stop.
if [ "${1-}" = --alone ]; then
    "step_$2"
    exit
fi

steps=(build info ptx values operators prediction snapshot gradcheck sanitizer counts bench profile)
if [ $# -gt 0 ]; then
    for step in "$@"; do
        if [[ " ${steps[*]} " != *" $step "* ]]; then
            echo "there is no step '$step', only ${steps[*]}" >&2
            exit 2
        fi
    done
    steps=("$@")
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
    if timeout --kill-after=5 595 bash benchmarks/gpu.sh --alone "$step" 2>&1 | tee "$results/$step.log"; then
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
