#include "memory/peak_ledger.h"

#include <algorithm>
#include <limits>
#include <utility>

namespace memcheck {

constexpr size_t kMostShots = 512;

double PeakLedger::seconds() const {
  if (given_seconds_) return *given_seconds_;
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count();
}

int PeakLedger::account_of(const Site& site) {
  const auto [found, is_new] = known_.try_emplace({site.path, site.line, site.module, site.phase, site.kind},
                                                  static_cast<int>(accounts_.size()));
  if (is_new) accounts_.push_back({site, {}, {}, peaks_, 0, shot_});
  return found->second;
}

// An account is brought up to the latest peak when it next changes: since that peak it has not, so what it holds is
// what it held then. A new peak therefore costs the same however many accounts there are.
void PeakLedger::change(int account, int64_t bytes, int64_t blocks) {
  Account& changed = accounts_[account];
  if (changed.settled < peaks_) {
    changed.at_peak = changed.now;
    changed.settled = peaks_;
  }
  if (changed.settled_shot < shot_) {
    changed.at_shot = changed.now.bytes;
    changed.settled_shot = shot_;
  }
  changed.now.bytes += bytes;
  changed.now.blocks += blocks;
}

void PeakLedger::end_event() {
  if (level_ > shots_.back().bytes) {
    ++shot_;
    shots_.back() = {events_, seconds(), level_, {}};
  }
}

void PeakLedger::begin_event() {
  if (events_++ % events_per_shot_ != 0) return;
  if (!shots_.empty()) shots_.back().sizes = sizes_at_shot();
  if (shots_.size() == kMostShots) {
    for (size_t i = 0; i < kMostShots / 2; ++i) {
      Shot &first = shots_[2 * i], &second = shots_[2 * i + 1];
      Shot highest = std::move(second.bytes > first.bytes ? second : first);
      shots_[i] = std::move(highest);
    }
    shots_.resize(kMostShots / 2);
    events_per_shot_ *= 2;
  }
  shots_.push_back({});
}

std::vector<int64_t> PeakLedger::sizes_at_shot() const {
  std::vector<int64_t> sizes;
  for (const Account& account : accounts_) {
    sizes.push_back(account.settled_shot < shot_ ? account.now.bytes : account.at_shot);
  }
  return sizes;
}

std::vector<PeakLedger::Shot> PeakLedger::shots() const {
  std::vector<Shot> shots = shots_;
  if (!shots.empty()) shots.back().sizes = sizes_at_shot();
  return shots;
}

void PeakLedger::allocate(uintptr_t address, int64_t bytes, const Site& site) {
  begin_event();
  const int account = account_of(site);
  change(account, bytes, 1);
  Block& block = blocks_[address];
  large_.erase(block.event);  // of a block whose release was not seen
  block = {bytes, account, events_};
  if (bytes >= least_bytes_) large_[events_] = {steps_, address};
  level_ += bytes;
  int64_t& phase_peak = phase_peaks_[static_cast<int>(site.phase)];
  phase_peak = std::max(phase_peak, level_);
  if (level_ > peak_.bytes) {
    ++peaks_;
    peak_ = {level_, events_, seconds(), steps_, site};
    if (!large_.empty()) {
      const Large& latest = large_.rbegin()->second;
      peak_.step = latest.step;
      peak_.site = accounts_[blocks_.at(latest.address).account].site;
    }
  }
  end_event();
}

void PeakLedger::release(uintptr_t address, int64_t bytes) {
  begin_event();
  const auto block = blocks_.find(address);
  if (block == blocks_.end()) {
    change(account_of({}), -bytes, 0);
  } else {
    change(block->second.account, -bytes, -1);
    large_.erase(block->second.event);
    blocks_.erase(block);
  }
  level_ -= bytes;
  end_event();
}

void PeakLedger::set_kind(uintptr_t address, Kind kind, std::optional<int> module) {
  const auto block = blocks_.find(address);
  if (block == blocks_.end()) return;
  Site site = accounts_[block->second.account].site;
  site.kind = kind;
  if (module) site.module = *module;
  const int account = account_of(site);
  change(block->second.account, -block->second.bytes, -1);
  change(account, block->second.bytes, 1);
  block->second.account = account;
}

void PeakLedger::set_kind_like(uintptr_t address, Kind kind, uintptr_t other) {
  const auto block = blocks_.find(other);
  if (block == blocks_.end()) return set_kind(address, kind, std::nullopt);
  set_kind(address, kind, accounts_[block->second.account].site.module);
}

void PeakLedger::refuse(int64_t bytes, const Site& site) {
  ++refusals_;
  last_refusal_ = {{level_, events_, seconds(), steps_, site}, bytes, {}};
  for (const Account& account : accounts_) {
    if (account.now.bytes != 0) {
      last_refusal_.alive.push_back({account.site, account.now.bytes, account.now.blocks});
    }
  }
}

std::vector<PeakLedger::Count> PeakLedger::counts() const {
  std::vector<Count> counts;
  for (const Account& account : accounts_) counts.push_back(account.now);
  return counts;
}

std::vector<Site> PeakLedger::sites() const {
  std::vector<Site> sites;
  for (const Account& account : accounts_) sites.push_back(account.site);
  return sites;
}

std::optional<Site> PeakLedger::site_of(uintptr_t address) const {
  const auto block = blocks_.find(address);
  if (block == blocks_.end()) return std::nullopt;
  return accounts_[block->second.account].site;
}

void PeakLedger::end_step() {
  ++steps_;
}

std::vector<PeakLedger::Alive> PeakLedger::alive_at_peak() const {
  std::vector<Alive> alive;
  for (const Account& account : accounts_) {
    const Count& then = account.settled < peaks_ ? account.now : account.at_peak;
    if (then.bytes != 0) alive.push_back({account.site, then.bytes, then.blocks});
  }
  return alive;
}

}  // namespace memcheck
