// Keeps a snapshot up to date with a delta log's folder.
#pragma once

#include <memory>
#include <mutex>
#include <string>

#include "serving/include/sparsekit_serving.h"
#include "serving/log_folder.h"
#include "serving/pins.h"
#include "serving/sides.h"

namespace sparsekit::serving {

class Live {
 public:
  // Lookups pin a side, and read its version: versions[side].
  Live(Pins* pins, Version* versions) : pins_(*pins), versions_(versions) {}

  // Lets lookups read a file; called once, before the first lookup. `folder` is empty for a
  // snapshot that was opened as a file.
  void start(std::string folder, std::unique_ptr<SnapshotFile> file);

  int follow(sk_progress* progress);
  int apply(const char* const* paths, int32_t num_paths, sk_progress* progress);

 private:
  // The result of a step of follow(): kAgain if there may be more to do, kListAgain if the folder
  // may have changed in the meantime.
  enum class Next { kDone, kAgain, kListAgain };

  const Version& newest() const { return versions_[pins_.active()]; }
  int finish(int status, sk_progress done, sk_progress* progress);
  int step(sk_progress* done, Next* next);
  int rebase(const LogFolder& log, sk_progress* done, Next* next);
  int advance(const LogFolder& log, sk_progress* done, Next* next);
  int read_versions(const LogFolder& log, uint64_t least, Side* side, Batch* batch, bool* broken,
                    Next* next);
  int read_version(const LogFolder& log, uint64_t version, const Side& side, Next* next);
  int open_base(uint64_t version, std::shared_ptr<Base>* base, Next* next);

  bool wait_until_idle() const;
  int busy() const;
  int synchronise();
  void make_room_to_publish();
  void publish(Batch batch, sk_progress* done);
  void drop_unused();
  void give_up(const Batch& batch);
  void name_tables(Base* base) const;

  Pins& pins_;
  Version* const versions_;
  std::mutex mutex_;  // of follow() and apply()
  std::string folder_;
  sk_open_options options_{};
  std::vector<std::string> names_;  // of the tables: callers keep pointers to them
  Side sides_[2];
  std::vector<DeltaFile> parts_;
  Batch last_;  // the active side has it; the other one not yet, if behind_
  bool behind_ = false;
  bool broken_ = false;  // the inactive side is of no use
  uint32_t batches_ = 0;
};

}  // namespace sparsekit::serving
