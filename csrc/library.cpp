// The Python module memcheck._C. Operators register themselves with the dispatcher, each in its own folder. Bound here
// is everything else: facts about the build, the plans of operators, and the tracking allocator.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "combinator/combinator.h"
#include "common/cpu_level.h"
#include "compressed_attention/compressed_attention_plan_cuda.h"
#include "linear_attention/linear_attention_plan_cuda.h"
#include "memory/allocation_timeline.h"
#include "memory/peak_ledger.h"
#include "memory/python_line.h"
#include "memory/tracking_allocator.h"
#include "softplus_attention/softplus_attention_plan_cuda.h"
#ifdef MEMCHECK_WITH_CUDA
#include "cuda_probe/cuda_probe.h"
#endif

namespace py = pybind11;

// What this build can do on this machine.
static void bind_build(py::module_& m) {
  // A bad MEMCHECK_CPU fails the import, not a training step.
  memcheck::cpu_level();
  m.def("cpu_level", [] { return memcheck::cpu_level_name(memcheck::cpu_level()); });
  m.def("cpu_levels", &memcheck::cpu_levels);
#ifdef MEMCHECK_WITH_CUDA
  // On the default stream: a kernel that touches no memory needs no order.
  m.def("cuda_probe", [] { return launch_cuda_probe(nullptr); });
#endif
}

static std::optional<std::pair<int64_t, int64_t>> refusal(const memcheck::AllocationTracker& tracker) {
  const auto last = tracker.refusal();
  if (!last) return std::nullopt;
  return std::pair(last->requested_bytes, last->in_use_bytes);
}

// Returns (address, bytes, path, module, node, (shape, dtype) or None) for each event.
static py::list events(const memcheck::AllocationTimeline& timeline, size_t from) {
  py::list rows;
  for (const memcheck::AllocationEvent& event : timeline.events(from)) {
    py::object tensor = py::none();
    if (event.shaped) tensor = py::make_tuple(py::tuple(py::cast(event.shape)), event.dtype);
    rows.append(py::make_tuple(event.address, event.bytes, event.path, event.module, event.node, tensor));
  }
  return rows;
}

static std::vector<std::pair<int, std::string>> paths(const memcheck::AllocationTimeline& timeline) {
  std::vector<std::pair<int, std::string>> rows;
  for (const memcheck::OperatorPath& path : timeline.paths()) rows.emplace_back(path.outer, path.name);
  return rows;
}

// (path, line, module, phase, kind); phase and kind by their numbers.
static py::tuple site_tuple(const memcheck::Site& site) {
  return py::make_tuple(site.path, site.line, site.module, static_cast<int>(site.phase), static_cast<int>(site.kind));
}

static py::list site_list(const std::vector<memcheck::Site>& sites) {
  py::list rows;
  for (const auto& site : sites) rows.append(site_tuple(site));
  return rows;
}

static memcheck::Site site_of(int path, int line, int module, int phase, int kind) {
  return {path, line, module, static_cast<memcheck::Phase>(phase), static_cast<memcheck::Kind>(kind)};
}

static py::list alive_list(const std::vector<memcheck::PeakLedger::Alive>& alive) {
  py::list rows;
  for (const auto& row : alive) rows.append(py::make_tuple(site_tuple(row.site), row.bytes, row.blocks));
  return rows;
}

static py::tuple moment_tuple(const memcheck::PeakLedger::Moment& moment) {
  return py::make_tuple(moment.bytes, moment.event, moment.seconds, moment.step, site_tuple(moment.site));
}

static py::list shot_list(const memcheck::PeakLedger& ledger) {
  py::list rows;
  for (const auto& shot : ledger.shots()) {
    const auto* data = reinterpret_cast<const char*>(shot.sizes.data());
    rows.append(py::make_tuple(shot.event, shot.seconds, py::bytes(data, shot.sizes.size() * sizeof(int64_t))));
  }
  return rows;
}

// Two int64 for each site, packed, because Python keeps many of these.
static py::bytes packed(const std::vector<memcheck::PeakLedger::Count>& counts) {
  static_assert(sizeof(memcheck::PeakLedger::Count) == 2 * sizeof(int64_t));
  return {reinterpret_cast<const char*>(counts.data()), counts.size() * sizeof(memcheck::PeakLedger::Count)};
}

// Python reads a ledger once the timeline that fills it is closed, or fills it itself under its own lock.
static void bind_ledger(py::module_& m) {
  using memcheck::Kind, memcheck::PeakLedger;
  py::class_<PeakLedger, std::shared_ptr<PeakLedger>>(m, "PeakLedger")
      .def(py::init<int64_t>(), py::arg("least_bytes") = 0)
      .def(
          "allocate",
          [](PeakLedger& ledger, uintptr_t address, int64_t bytes, int path, int line, int module, int phase,
             int kind) { ledger.allocate(address, bytes, site_of(path, line, module, phase, kind)); },
          py::arg("address"), py::arg("bytes"), py::arg("path") = 0, py::arg("line") = 0, py::arg("module") = 0,
          py::arg("phase") = 0, py::arg("kind") = 0)
      .def("refuse", [](PeakLedger& ledger, int64_t bytes, int path, int line, int module, int phase,
                        int kind) { ledger.refuse(bytes, site_of(path, line, module, phase, kind)); })
      .def("release", &PeakLedger::release, py::arg("address"), py::arg("bytes"))
      .def("set_kind", [](PeakLedger& ledger, uintptr_t address, int kind,
                          std::optional<int> module) { ledger.set_kind(address, static_cast<Kind>(kind), module); })
      .def("set_kind_like", [](PeakLedger& ledger, uintptr_t address, int kind,
                               uintptr_t other) { ledger.set_kind_like(address, static_cast<Kind>(kind), other); })
      .def("end_step", &PeakLedger::end_step)
      .def("set_seconds", &PeakLedger::set_seconds, "replaces the clock")
      .def_property_readonly("events", &PeakLedger::events)
      .def_property_readonly("steps", &PeakLedger::steps)
      .def_property_readonly("level", &PeakLedger::level, "bytes alive now")
      .def_property_readonly("seconds", &PeakLedger::seconds, "since the ledger was made")
      .def(
          "peak", [](const PeakLedger& ledger) { return moment_tuple(ledger.peak()); },
          "(bytes, event, seconds, optimizer steps before, site)")
      .def("phase_peaks", &PeakLedger::phase_peaks, "the highest sum after an allocation of each phase")
      .def(
          "alive_at_peak", [](const PeakLedger& ledger) { return alive_list(ledger.alive_at_peak()); },
          "(site, bytes, blocks) of each site")
      .def(
          "counts", [](const PeakLedger& ledger) { return packed(ledger.counts()); },
          "bytes and blocks alive now at each site, as packed int64")
      .def(
          "sites", [](const PeakLedger& ledger) { return site_list(ledger.sites()); }, "the sites of counts()")
      .def_property_readonly("refusals", &PeakLedger::refusals)
      .def(
          "last_refusal",
          [](const PeakLedger& ledger) {
            const auto& last = ledger.last_refusal();
            return py::make_tuple(moment_tuple(last.moment), last.requested_bytes, alive_list(last.alive));
          },
          "(moment, requested bytes, what was alive)")
      .def("shots", &shot_list,
           "(event, seconds, bytes at each of sites() as packed int64) of the highest sum of each group of events");
  m.def("set_python_lines", [](std::vector<std::string> skipped_prefixes, const py::object& engine_code) {
    memcheck::set_python_lines(std::move(skipped_prefixes), engine_code.inc_ref().ptr());
  });
  m.def("python_lines", &memcheck::python_lines, "(file, line, function) of each number");
}

static void bind_timeline(py::module_& m) {
  using memcheck::AllocationTimeline, memcheck::Kind;
  py::class_<AllocationTimeline>(m, "AllocationTimeline")
      .def(py::init<std::shared_ptr<memcheck::PeakLedger>, int64_t>(), py::arg("ledger") = py::none(),
           py::arg("least_bytes") = 0)
      .def("set_module", &AllocationTimeline::set_module, "of this thread; returns the one before")
      .def("begin_step", &AllocationTimeline::begin_step)
      .def("end_step", &AllocationTimeline::end_step)
      .def("set_kind", [](AllocationTimeline& timeline, uintptr_t address, int kind,
                          std::optional<int> module) { timeline.set_kind(address, static_cast<Kind>(kind), module); })
      .def("set_kind_like", [](AllocationTimeline& timeline, uintptr_t address, int kind,
                               uintptr_t other) { timeline.set_kind_like(address, static_cast<Kind>(kind), other); })
      .def("__len__", &AllocationTimeline::size, "events so far")
      .def("close", &AllocationTimeline::close)
      .def("events", &events, py::arg("first") = 0,
           "(address, bytes, path, module, node, (shape, dtype) or None) of each from the first on, in their order; of "
           "a free, bytes are negative")
      .def(
          "counts", [](const AllocationTimeline& timeline) { return packed(timeline.counts()); }, "of its ledger, now")
      .def(
          "sites", [](const AllocationTimeline& timeline) { return site_list(timeline.sites()); }, "of counts()")
      .def("paths", &paths, "(the path around it, its innermost operator) of each; path 0 is outside of all operators");
}

static void bind_memory(py::module_& m) {
  using memcheck::AllocationTracker;
  py::class_<AllocationTracker>(m, "AllocationTracker")
      .def(py::init<int64_t, std::optional<int64_t>>(), py::arg("held_bytes") = 0, py::arg("limit_bytes") = py::none())
      .def("current_bytes", &AllocationTracker::current_bytes)
      .def("peak_bytes", &AllocationTracker::peak_bytes)
      .def("reset_peak", &AllocationTracker::reset_peak)
      .def("refusal", &refusal, "(requested bytes, bytes in use) of the last allocation refused, or None")
      .def("close", &AllocationTracker::close);
  m.def(
      "block_source", [] { return reinterpret_cast<uintptr_t>(&memcheck::block_source); },
      "the address of the pointer by which a simulated CPU serves blocks");
  m.def("keep_installed", &memcheck::keep_installed, "the tracking allocator serves blocks until let_go()");
  m.def("let_go", &memcheck::let_go);
}

static memcheck::Dtype dtype_named(const std::string& name) {
  if (name == "float64") return memcheck::Dtype::Float64;
  if (name == "float32") return memcheck::Dtype::Float32;
  if (name == "float16") return memcheck::Dtype::Float16;
  if (name == "bfloat16") return memcheck::Dtype::BFloat16;
  throw py::value_error("dtype must be float64, float32, float16 or bfloat16, got '" + name + "'");
}

// Whether a plan is asked for CUDA. Plans of CUDA need neither a GPU nor a build with CUDA kernels.
static bool is_cuda(const std::string& device) {
  if (device != "cpu" && device != "cuda") throw py::value_error("device must be cpu or cuda, got '" + device + "'");
  return device == "cuda";
}

// (queries, keys) of each sequence of a batch that is packed or padded, or none.
using Lengths = std::optional<std::vector<std::pair<int64_t, int64_t>>>;

// The table of a batch, for its plan, which reads nothing of it but these lengths.
struct PlannedSequences {
  std::vector<memcheck::Sequence> sequences;
  memcheck::SequenceTable table;

  PlannedSequences(const Lengths& lengths, bool packed) {
    if (!lengths) return;
    for (const auto& [queries, keys] : *lengths) sequences.push_back({0, 0, queries, 0, keys});
    sequences.push_back({});  // a table without sequences is a table
    table = {sequences.data(), static_cast<int64_t>(lengths->size()), packed};
  }
};

// The bytes that an operator needs beside inputs, outputs and gradients, from the plan that its glue allocates by.
static std::map<std::string, int64_t> softplus_attention_plan(int64_t B, int64_t S, int64_t T, int64_t R, bool causal,
                                                              const std::string& dtype, int64_t threads,
                                                              const std::string& device, const Lengths& lengths,
                                                              bool packed) {
  const PlannedSequences sequences(lengths, packed);
  const memcheck::SoftplusAttentionShape shape{B, S, T, R, causal, sequences.table};
  const memcheck::Dtype type = dtype_named(dtype);
  const auto plan_of = is_cuda(device) ? memcheck::softplus_attention_plan_cuda : memcheck::softplus_attention_cpu.plan;
  const auto plan = plan_of(shape, type, threads);
  return {{"carries", shape.carries_bytes(type)},
          {"forward_scratch", plan.forward_scratch_bytes + plan.forward_carries_bytes},
          {"forward_sums", plan.forward_scratch_bytes},
          {"backward_scratch", plan.backward_scratch_bytes}};
}

static std::map<std::string, int64_t> linear_attention_plan(int64_t B, int64_t H, int64_t Hkv, int64_t S, int64_t T,
                                                            int64_t D, int64_t Dv, bool causal,
                                                            const std::string& dtype, int64_t threads,
                                                            const std::string& device, bool decayed, bool decays_learn,
                                                            bool continued, bool normalize, const Lengths& lengths,
                                                            bool packed) {
  memcheck::LinearAttentionShape shape{B, H, Hkv, S, T, D, Dv, causal, memcheck::FeatureMap::EluPlusOne};
  shape.decayed = decayed;
  shape.decays_learn = decays_learn;
  shape.continued = continued;
  shape.normalize = normalize;
  const PlannedSequences sequences(lengths, packed);
  shape.sequences = sequences.table;
  const memcheck::Dtype type = dtype_named(dtype);
  const auto plan_of = is_cuda(device) ? memcheck::linear_attention_plan_cuda : memcheck::linear_attention_cpu.plan;
  const auto plan = plan_of(shape, type, threads);
  return {{"forward_states", plan.forward_states_bytes},
          {"forward_scratch", plan.forward_states_bytes + plan.forward_scratch_bytes},
          {"backward_rows", plan.rows_bytes},
          {"backward_states", plan.backward_states_bytes},
          {"backward_scratch", plan.rows_bytes + plan.backward_states_bytes + plan.backward_scratch_bytes}};
}

static std::map<std::string, int64_t> combinator_plan(int64_t N, int64_t E, const std::string& dtype,
                                                      const std::string& device) {
  const auto plan_of = is_cuda(device) ? memcheck::combinator_plan_cuda : memcheck::combinator_cpu.plan;
  const auto plan = plan_of(N, E, dtype_named(dtype));
  return {{"rows", plan.rows},          {"kept_rows", plan.kept_rows}, {"preactivations", plan.preactivations_bytes},
          {"chunk", plan.chunk_bytes},  {"wide", plan.wide_bytes},     {"sums", plan.sums_bytes},
          {"weight", plan.weight_bytes}};
}

static std::map<std::string, int64_t> compressed_attention_plan(int64_t B, int64_t H, int64_t Hkv, int64_t S, int64_t T,
                                                                int64_t D, int64_t factor, bool causal,
                                                                const std::string& dtype, int64_t threads,
                                                                const std::string& device, const Lengths& lengths,
                                                                bool packed, int64_t window, int64_t first,
                                                                std::optional<int64_t> blocks) {
  const PlannedSequences sequences(lengths, packed);
  const int64_t C = blocks.value_or(memcheck::compressed_attention_blocks(T, factor, packed, sequences.table.count));
  memcheck::CompressedAttentionShape shape{B, H, Hkv, S, T, D, C, factor, causal, false};
  shape.sequences = sequences.table;
  shape.lag = window;
  const memcheck::Dtype type = dtype_named(dtype);
  const auto plan_of =
      is_cuda(device) ? memcheck::compressed_attention_plan_cuda : memcheck::compressed_attention_cpu.plan;
  const auto plan = plan_of(shape, {window, first}, type, threads);
  return {{"lse", B * H * S * memcheck::acc_bytes(type)},
          {"compressed", 2 * B * Hkv * C * D * memcheck::element_bytes(type)},
          {"forward_scratch", plan.forward_scratch_bytes},
          {"pooled_forward_scratch", plan.pooled_forward_scratch_bytes},
          {"delta", plan.delta_bytes},
          {"backward_scratch", plan.backward_scratch_bytes},
          {"extension_scratch", plan.extension_scratch_bytes}};
}

static void bind_plans(py::module_& m) {
  m.def(
      "cpu_multiplies",
      [](const std::string& dtype, int64_t rows) { return memcheck::cpu_multiplies(dtype_named(dtype), rows); },
      py::kw_only(), py::arg("dtype"), py::arg("rows"),
      "whether products of matrices with so many rows are formed in the dtype itself, not in float32");
  m.def("combinator_plan", &combinator_plan, py::kw_only(), py::arg("N"), py::arg("E"), py::arg("dtype"),
        py::arg("device") = "cpu",
        "rows of a chunk, kept_rows where they are kept, and bytes: preactivations (kept for backward in performance "
        "mode), chunk (backward, and a "
        "forward that keeps nothing), wide and sums (where the weight is 16-bit and wants a gradient), weight (in "
        "float32 where the CPU has no products in 16 bits; wide then serves all products). device: cpu or cuda");
  m.def("softplus_attention_plan", &softplus_attention_plan, py::kw_only(), py::arg("B"), py::arg("S"), py::arg("T"),
        py::arg("R"), py::arg("causal"), py::arg("dtype"), py::arg("threads"), py::arg("device") = "cpu",
        py::arg("sequences") = py::none(), py::arg("packed") = false,
        "bytes: carries (kept for backward), forward_sums (beside them), forward_scratch (when nothing is kept), "
        "backward_scratch. sequences: (queries, keys) of each");
  m.def("linear_attention_plan", &linear_attention_plan, py::kw_only(), py::arg("B"), py::arg("H"), py::arg("Hkv"),
        py::arg("S"), py::arg("T"), py::arg("D"), py::arg("Dv"), py::arg("causal"), py::arg("dtype"),
        py::arg("threads"), py::arg("device") = "cpu", py::arg("decayed") = false, py::arg("decays_learn") = false,
        py::arg("continued") = false, py::arg("normalize") = true, py::arg("sequences") = py::none(),
        py::arg("packed") = false,
        "bytes: forward_scratch, of which forward_states are allocated first; backward_scratch, of which backward_rows "
        "are allocated first and then backward_states; those of CUDA are the same for any number of threads. "
        "sequences: (queries, keys) of each");
  m.def("compressed_attention_plan", &compressed_attention_plan, py::kw_only(), py::arg("B"), py::arg("H"),
        py::arg("Hkv"), py::arg("S"), py::arg("T"), py::arg("D"), py::arg("factor"), py::arg("causal"),
        py::arg("dtype"), py::arg("threads"), py::arg("device") = "cpu", py::arg("sequences") = py::none(),
        py::arg("packed") = false, py::arg("window") = 0, py::arg("first") = 0, py::arg("blocks") = py::none(),
        "bytes: lse and compressed (keys and values, kept for backward), forward_scratch (pooled_forward_scratch of "
        "those that came pooled), delta and backward_scratch; threads count on the CPU alone. sequences: (queries, "
        "keys) of each, in a packed or padded batch. window: its size, 0 without one, and the first position of k. "
        "blocks: those of keys and values that came pooled");
}

PYBIND11_MODULE(_C, m) {
  m.doc() = "memcheck's compiled half: operators (torch.ops.memcheck), their memory plans, the tracking allocator";
  bind_build(m);
  bind_memory(m);
  bind_ledger(m);
  bind_timeline(m);
  bind_plans(m);
}
