// An open snapshot.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>

#include "serving/live.h"
#include "serving/pins.h"
#include "serving/pool_kernels.h"
#include "serving/snapshot_file.h"
#include "serving/version.h"

struct sk_snapshot {
  uint64_t number;   // of this snapshot among all that the process has opened; never 0
  std::string path;  // as the caller has said it
  bool is_folder = false;
  const sparsekit::serving::PoolKernels* kernels = nullptr;
  sparsekit::serving::Pins pins;
  sparsekit::serving::Version sides[2];
  uint64_t log_id = 0;
  sparsekit::serving::Live live{&pins, sides};  // owns what the sides refer to
};

namespace sparsekit::serving {

// Pins the version that a call reads until the call ends: the version that the caller has pinned,
// if any, otherwise the newest.
class Reading {
 public:
  Reading(sk_snapshot* snapshot, const sk_pin* pin);
  ~Reading() {
    if (own_) snapshot_->pins.unpin(pin_);
  }
  Reading(const Reading&) = delete;
  Reading& operator=(const Reading&) = delete;

  // Returns SK_BAD_ARGUMENT if the caller's pin is not from this snapshot.
  int status() const { return status_; }
  const Version& version() const { return snapshot_->sides[pin_.side]; }

 private:
  sk_snapshot* snapshot_;
  Pins::Pin pin_{};
  bool own_;
  int status_ = 0;
};

}  // namespace sparsekit::serving
