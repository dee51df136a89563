#!/usr/bin/env bash
# Runs everything that needs a GPU, with the installed python3 and torch; it downloads and installs nothing.
# benchmarks/gpu.sh [WORD ...] runs steps, or parts, which are several steps; without words, all parts. Each word takes
# at most MEMCHECK_MINUTES, 8 by default: then its step is stopped, and the same command goes on from there later. A
# failed step does not stop the others; the exit code is 1 if a step failed or was stopped.
#   times      bench parts
#   counters   stalls counts
#   checks     failed ptx values operators prediction snapshot gradcheck sanitizer slow profile
# First the extension is built for the GPU of this machine.
#   build      builds the extension, with nvcc for its kernels, and prints memcheck info
#   bench      every operator, compared with its alternatives: bench.md, bench.json
#   parts      float32 on tensor cores: tests of linear and compressed attention, and bench, into float32_on_tensor_cores/
#   stalls     where warps of the large cases wait, by Nsight Compute
#   counts     what the host counts of the kernels, compared with Nsight Compute, and derived times with measured ones
#   failed     tests that failed in a stored run, in one process
#   ptx        inline PTX instructions, compared with their host implementations
#   values     quick tests of tests/ops with tensors on the GPU: values, gradients, layouts, bytes, opcheck
#   operators  tests/gpu: streams, CUDA graphs, peaks, large tensors; timelines and statistics of CUDA memory
#   prediction  predicted bytes, compared with those of the caching allocator
#   snapshot   memcheck run --snapshot, replayed by the allocator's model and compared with torch's statistics
#   gradcheck  gradients, compared with central differences in float64
#   sanitizer  compute-sanitizer on every operator: memcheck and racecheck
#   slow       the other tests of tests/ops
#   profile    the profiles of attentions and of a whole model
# Results and logs go to MEMCHECK_RESULTS, by default the folder that benchmarks/results/ has for this GPU, h200 say. The
# last line of STEP.log has the step's outcome and a hash of the sources. A step that passed or failed is not run again
# for the same sources unless its log is removed, nor a test that passed, by tests.txt, nor a case of stalls.csv.
set -uo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
# Scripts in other folders import memcheck from here; it need not be installed.
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
# Without it torch warns at every product that its bits may change from run to run, because tests turn this warning on.
export CUBLAS_WORKSPACE_CONFIG=${CUBLAS_WORKSPACE_CONFIG:-:4096:8}

declare -A parts=(
    [times]="bench parts"
    [counters]="stalls counts"
    [checks]="failed ptx values operators prediction snapshot gradcheck sanitizer slow profile"
)

# 5 is pytest's exit code if no test is left.
run_pytest() {
    "$python" -m pytest -q --outcomes "$MEMCHECK_RESULTS/tests.txt" "$@"
    local code=$?
    return $((code == 5 ? 0 : code))
}
run_workers() {
    local workers=()
    if "$python" -c 'import xdist' 2>/dev/null; then workers=(--numprocesses 8 --dist worksteal); fi
    run_pytest "${workers[@]}" "$@"
}

architecture() { nvidia-smi --query-gpu=compute_cap --format=csv,noheader | head -n 1; }

# Some toolchains link libstdc++ statically. A module with a copy of it crashes where it raises an error of torch.
step_build() {
    export TORCH_CUDA_ARCH_LIST=${TORCH_CUDA_ARCH_LIST:-$(architecture)}
    LDFLAGS="-Wl,--no-as-needed,-l:libstdc++.so.6,--as-needed ${LDFLAGS-}" MEMCHECK_CUDA=1 MEMCHECK_FLOAT32_TENSOR_CORES=1 \
        "$python" setup.py build_ext --inplace && "$python" -m memcheck info
}
step_bench() { "$python" benchmarks/gpu.py; }
step_parts() {
    export MEMCHECK_FLOAT32_TENSOR_CORES=1 MEMCHECK_RESULTS=$MEMCHECK_RESULTS/float32_on_tensor_cores
    "$python" benchmarks/gpu.py --only linear compressed --dtype float32
    local code=$?
    # One test has an infinity in v, which these parts make NaN.
    run_workers tests/ops --device cuda -m "not cpu and not slow and not ci" \
        -k "(linear or compressed) and not test_a_step_is_one_operator" && return $code
}
step_stalls() { "$python" benchmarks/gpu_counts.py --stalls; }
step_counts() { "$python" benchmarks/gpu_counts.py; }
step_failed() {
    run_pytest --failed tests/ops --device cuda -m "not cpu"
    local code=$?
    run_pytest --failed tests/gpu && return $code
}
step_ptx() { run_pytest tests/gpu/test_ptx_cuda.py; }
step_values() { run_workers tests/ops --device cuda -m "not cpu and not slow and not ci"; }
# In one process, because large tensors take most of the memory.
step_operators() {
    run_pytest tests/gpu --ignore tests/gpu/test_ptx_cuda.py --ignore tests/gpu/test_prediction_cuda.py \
        --ignore tests/gpu/test_models_cuda.py --ignore tests/gpu/test_snapshot_cuda.py
}
step_prediction() { run_pytest tests/gpu/test_prediction_cuda.py tests/gpu/test_models_cuda.py; }
step_snapshot() { run_pytest tests/gpu/test_snapshot_cuda.py; }
step_gradcheck() { "$python" -m memcheck.gradcheck --device cuda; }
step_slow() { run_workers tests/ops --device cuda -m "not cpu and (slow or ci)"; }
step_profile() {
    "$python" -m memcheck.profile_attention --device cuda --output "$MEMCHECK_RESULTS/profile" || return
    "$python" -m memcheck.profile_model --device cuda --size small --context 512 --bsz 8 --dtype fp32,bf16 \
        --attention-type naive,softmax,linear,compressed,softplus --output "$MEMCHECK_RESULTS/model"
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

words=("$@")
[ $# -gt 0 ] || words=(times counters checks)
for word in "${words[@]}"; do
    if [ -z "${parts[$word]-}" ] && ! declare -F "step_$word" >/dev/null; then
        echo "there is no step '$word', only build ${parts[*]}, and the parts ${!parts[*]}" >&2
        exit 2
    fi
done
if ! machine=$(nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader 2>/dev/null); then
    echo "no GPU here: nvidia-smi names none" >&2
    exit 1
fi
# As gpu_harness.results_folder spells it.
name=${machine%%,*} name=${name,,} name=${name#nvidia }
results=${MEMCHECK_RESULTS:-benchmarks/results/${name// /-}}
sources=$(find csrc memcheck tests benchmarks/*.* -type f ! -name '*.so' ! -name '*.pyc' \
    ! -name _build.py -print0 | sort -z | xargs -0 sha1sum | sha1sum | head -c 12)
export MEMCHECK_RESULTS=$results MEMCHECK_SOURCES=$sources
mkdir -p "$results"
{
    echo "GPU, driver, memory: $machine"
    "$python" -c 'import platform, torch; print("Python", platform.python_version(), "torch", torch.__version__)'
    echo "$(date -u +%Y-%m-%d), sources $sources"
} >"$results/machine.txt"

# Runs a step until the deadline. The interrupt lets pytest print what has failed so far.
run_step() {
    local outcome=passed started=$SECONDS left=$((deadline - SECONDS))
    [ $left -gt 0 ] || return
    timeout --signal=INT --kill-after=10 $left bash benchmarks/gpu.sh --alone "$1" 2>&1 | tee "$results/$1.log"
    case $? in 0) ;; 124 | 137) outcome=stopped ;; *) outcome=FAILED ;; esac
    echo "== $outcome after $((SECONDS - started)) s, sources $sources" >>"$results/$1.log"
}
has_ended() { tail -n 1 "$results/$1.log" 2>/dev/null | grep -qE "^== ($2) .* $sources\$"; }

failed=0
table=""
for word in "${words[@]}"; do
    deadline=$((SECONDS + 60 * ${MEMCHECK_MINUTES:-8}))
    run_step build >/dev/null
    for step in ${parts[$word]-$word}; do
        if [ "$step" != build ] && ! has_ended "$step" "passed|FAILED"; then
            echo "== $step"
            if has_ended build passed; then run_step "$step"; fi
        fi
        has_ended "$step" passed || failed=1
        line=$(has_ended "$step" ".*" && tail -n 1 "$results/$step.log")
        table+=$(printf '%-10s %s' "$step" "${line:-not run}")$'\n'
    done
done
has_ended build passed || tail -n 20 "$results/build.log" >&2
echo "== $machine"
printf '%s' "$table" | tee "$results/steps.txt"
exit $failed
