// What is alive by the place that allocated it, now and at the peak. Its size does not grow with the number of events.
#pragma once

#include <array>
#include <chrono>
#include <cstdint>
#include <limits>
#include <map>
#include <optional>
#include <tuple>
#include <unordered_map>
#include <vector>

namespace memcheck {

enum class Phase : uint8_t { Elsewhere, Forward, Backward, OptimizerStep };
enum class Kind : uint8_t { Plain, Parameter, Buffer, Gradient, OptimizerState };

// Where a block was allocated, and what it holds. The numbers are indices into lists that the caller keeps; 0 is none.
struct Site {
  int path = 0;    // operators and autograd nodes
  int line = 0;    // of Python
  int module = 0;  // whose forward ran
  Phase phase = Phase::Elsewhere;
  Kind kind = Kind::Plain;
};

class PeakLedger {
 public:
  // The sum that was alive after an event, and the site that names it: of a peak, that of the latest block of
  // least_bytes or more that was alive; without such a block, and of a refusal, that of the event.
  struct Moment {
    int64_t bytes = 0;
    int64_t event = 0;  // counted from 1; 0 is the beginning
    double seconds = 0;
    int64_t step = 0;  // optimizer steps that had ended when the site allocated
    Site site;
  };
  struct Alive {
    Site site;
    int64_t bytes;
    int64_t blocks;
  };
  struct Count {
    int64_t bytes = 0;
    int64_t blocks = 0;
  };
  struct Refusal {
    Moment moment;
    int64_t requested_bytes = 0;
    std::vector<Alive> alive;
  };
  // The highest sum of several events in a row, with the bytes alive at every site that there was.
  struct Shot {
    int64_t event = 0;
    double seconds = 0;
    int64_t bytes = std::numeric_limits<int64_t>::min();
    std::vector<int64_t> sizes;
  };

  explicit PeakLedger(int64_t least_bytes = 0) : least_bytes_(least_bytes) {}

  void allocate(uintptr_t address, int64_t bytes, const Site& site);
  // A block that is not known was there before; its bytes become negative ones of Site{}.
  void release(uintptr_t address, int64_t bytes);
  // Says what a block holds; nothing happens if the address is not that of a block.
  void set_kind(uintptr_t address, Kind kind, std::optional<int> module);
  // The kind, and the module of another block.
  void set_kind_like(uintptr_t address, Kind kind, uintptr_t other);
  void refuse(int64_t bytes, const Site& site);
  void end_step();

  int64_t events() const { return events_; }
  int64_t steps() const { return steps_; }
  int64_t level() const { return level_; }
  const Moment& peak() const { return peak_; }
  const std::array<int64_t, 4>& phase_peaks() const { return phase_peaks_; }
  std::vector<Alive> alive_at_peak() const;
  // What is alive now at every site so far. A site keeps its place; new ones come last.
  std::vector<Count> counts() const;
  std::vector<Site> sites() const;
  // Of the block at an address.
  std::optional<Site> site_of(uintptr_t address) const;
  int64_t refusals() const { return refusals_; }
  const Refusal& last_refusal() const { return last_refusal_; }
  std::vector<Shot> shots() const;
  double seconds() const;
  // Replaces the clock, for events that are noted after they happened.
  void set_seconds(double seconds) { given_seconds_ = seconds; }

 private:
  struct Account {
    Site site;
    Count now;
    Count at_peak;  // as of the peak numbered `settled`
    int64_t settled = 0;
    int64_t at_shot = 0;  // bytes as of the shot numbered `settled_shot`
    int64_t settled_shot = 0;
  };
  struct Block {
    int64_t bytes = 0;
    int account = 0;
    int64_t event = 0;
  };
  struct Large {
    int64_t step;
    uintptr_t address;
  };

  int account_of(const Site& site);
  void change(int account, int64_t bytes, int64_t blocks);
  void begin_event();
  void end_event();
  std::vector<int64_t> sizes_at_shot() const;

  int64_t least_bytes_;
  std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
  std::optional<double> given_seconds_;
  std::vector<Account> accounts_;
  std::map<std::tuple<int, int, int, Phase, Kind>, int> known_;
  std::unordered_map<uintptr_t, Block> blocks_;
  std::map<int64_t, Large> large_;  // blocks of least_bytes_ or more, by the event of their allocation
  int64_t events_ = 0;
  int64_t steps_ = 0;
  int64_t level_ = 0;
  int64_t peaks_ = 0;
  Moment peak_;
  std::array<int64_t, 4> phase_peaks_{};
  int64_t refusals_ = 0;
  Refusal last_refusal_;
  std::vector<Shot> shots_;  // the last one has no sizes yet
  int64_t events_per_shot_ = 1;
  int64_t shot_ = 0;  // counts each new highest sum
};

}  // namespace memcheck
