#include "simulated/log.h"

#include <ATen/record_function.h>
#include <torch/csrc/autograd/function.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <deque>
#include <mutex>
#include <set>
#include <unordered_map>
#include <vector>

#include "simulated/exports.h"

namespace memcheck::simulated {
namespace {

enum class Happened : int64_t { allocated, freed, emptied };

// As memcheck.simulated.log reads it. name, node: numbers of names.
struct Entry {
  Happened kind;
  int64_t device, address, bytes, block_bytes, stream;
  Purpose purpose;
  int64_t name, node;
  int64_t sequence;  // of the node, -1 without one
  int64_t mark;      // the last one of Python
};

struct Log {
  std::mutex lock;
  bool is_on = false;
  std::vector<Entry> entries;
  std::deque<std::string> names;  // Python reads one while others are added.
  std::unordered_map<std::string, int64_t> numbers;
  std::set<std::pair<std::string, std::string>> calls;  // An operator, and the one that calls it, if one does.
  std::set<std::string> ran;                            // Operators, on the GPU.
  std::string calls_text;
  int64_t mark = 0;
  at::CallbackHandle watch = at::INVALID_CALLBACK_HANDLE;

  int64_t number(const std::string& name) {
    auto [found, is_new] = numbers.try_emplace(name, static_cast<int64_t>(names.size()));
    if (is_new) names.push_back(name);
    return found->second;
  }
};
Log& the_log = *new Log();

// Who asks for memory in this thread.
struct Asker {
  std::vector<const char*> operators;  // the innermost last
  Purpose purpose = Purpose::tensor;
  const std::string* what = nullptr;
  std::string name, node;
  int64_t sequence = -1;
};
thread_local Asker asker;

// Operators that only make the memory of another one.
bool is_factory(const std::string& name) {
  static const std::array<std::string, 6> factories{"aten::empty",          "aten::empty_strided",
                                                    "aten::empty_like",     "aten::new_empty",
                                                    "aten::empty_permuted", "aten::new_empty_strided"};
  return std::find(factories.begin(), factories.end(), name) != factories.end();
}

std::string running_operator() {
  for (auto name = asker.operators.rbegin(); name != asker.operators.rend(); ++name)
    if (!is_factory(*name) && std::strncmp(*name, "autograd::", 10) != 0) return *name;
  return asker.operators.empty() ? "" : asker.operators.back();
}

std::unique_ptr<at::ObserverContext> begin_operator(const at::RecordFunction& function) {
  const char* by = asker.operators.empty() ? "" : asker.operators.back();
  asker.operators.push_back(function.name());
  std::lock_guard<std::mutex> locked(the_log.lock);
  the_log.calls.emplace(function.name(), by);
  return nullptr;
}

void end_operator(const at::RecordFunction&, at::ObserverContext*) {
  if (!asker.operators.empty()) asker.operators.pop_back();
}

void add(Happened kind, const Block* block, int device) {
  std::lock_guard<std::mutex> locked(the_log.lock);
  Entry entry{kind, device, 0, 0, 0, 0, asker.purpose, -1, -1, -1, the_log.mark};
  if (block != nullptr) {
    entry.address = static_cast<int64_t>(block->address);
    entry.bytes = block->requested;
    entry.block_bytes = block->bytes;
    entry.stream = block->pool->stream;
  }
  if (kind == Happened::allocated) {
    entry.name = the_log.number(asker.name);
    entry.node = the_log.number(asker.node);
    entry.sequence = asker.sequence;
  }
  the_log.entries.push_back(entry);
}

}  // namespace

Requesting::Requesting(Purpose purpose, const std::string& name) {
  asker.purpose = purpose;
  asker.what = &name;
}
Requesting::~Requesting() {
  asker.purpose = Purpose::tensor;
  asker.what = nullptr;
}

bool is_logging() {
  return the_log.is_on;
}

void prepare_log() {
  if (!the_log.is_on) return;
  auto node = torch::autograd::get_current_node();
  asker.node = node == nullptr ? "" : node->name();
  asker.sequence = node == nullptr ? -1 : static_cast<int64_t>(node->sequence_nr());
  asker.name = asker.what == nullptr ? running_operator() : *asker.what;
}

void log_operator(const std::string& name) {
  if (!the_log.is_on) return;
  std::lock_guard<std::mutex> locked(the_log.lock);
  the_log.ran.insert(name);
}

void log_allocated(const Block& block, int device) {
  if (the_log.is_on) add(Happened::allocated, &block, device);
}

void log_freed(const Block& block, int device) {
  if (the_log.is_on) add(Happened::freed, &block, device);
}

void log_emptied_cache() {
  if (the_log.is_on) add(Happened::emptied, nullptr, 0);
}

}  // namespace memcheck::simulated

using namespace memcheck::simulated;

// Begins an empty log, or ends it.
MEMCHECK_EXPORT void memcheck_simulated_log(int is_on) {
  std::lock_guard<std::mutex> locked(the_log.lock);
  if (the_log.is_on) at::removeCallback(the_log.watch);
  the_log.entries.clear();
  the_log.calls.clear();
  the_log.ran.clear();
  the_log.mark = 0;
  the_log.is_on = is_on != 0;
  if (the_log.is_on)
    the_log.watch = at::addGlobalCallback(
        at::RecordFunctionCallback(&begin_operator, &end_operator).scopes({at::RecordScope::FUNCTION}));
}
// What ran is forgotten; what was allocated is not.
MEMCHECK_EXPORT void memcheck_simulated_forget_calls() {
  std::lock_guard<std::mutex> locked(the_log.lock);
  the_log.calls.clear();
  the_log.ran.clear();
}
// Entries that follow carry the number, which says what Python does.
MEMCHECK_EXPORT void memcheck_simulated_mark(int64_t mark) {
  std::lock_guard<std::mutex> locked(the_log.lock);
  the_log.mark = mark;
}
// Copies at most so many entries from a place on, as autograd's threads may add some meanwhile. Returns how many.
MEMCHECK_EXPORT int64_t memcheck_simulated_logged(int64_t from, int64_t most, void* entries) {
  std::lock_guard<std::mutex> locked(the_log.lock);
  const int64_t count = std::min(most, static_cast<int64_t>(the_log.entries.size()) - from);
  if (count > 0) std::copy_n(the_log.entries.begin() + from, count, static_cast<Entry*>(entries));
  return std::max<int64_t>(count, 0);
}
MEMCHECK_EXPORT const char* memcheck_simulated_name(int64_t number) {
  std::lock_guard<std::mutex> locked(the_log.lock);
  return the_log.names.at(number).c_str();
}
// A line for each operator: its name and that of one that calls it, and a tab between them. A name alone: it ran on
// the GPU.
MEMCHECK_EXPORT const char* memcheck_simulated_calls() {
  std::lock_guard<std::mutex> locked(the_log.lock);
  the_log.calls_text.clear();
  for (const auto& [name, by] : the_log.calls) the_log.calls_text += name + "\t" + by + "\n";
  for (const std::string& name : the_log.ran) the_log.calls_text += name + "\n";
  return the_log.calls_text.c_str();
}
