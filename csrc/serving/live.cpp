#include "serving/live.h"

#include <time.h>

#include <chrono>
#include <cinttypes>
#include <new>

#include "serving/message.h"
#include "serving/structs.h"

namespace sparsekit::serving {
namespace {

// Number of rows and edits after which lookups move to the updated side, so that they need not wait
// for the end of a long series of deltas.
constexpr int64_t kMostRowsTogether = 1 << 20;
// Maximum number of consecutive listings that contradict what a call then finds in the folder.
constexpr int kMostListings = 20;
// Maximum number of steps in a call, so that it ends even if the writer is faster than this reader.
constexpr int kMostSteps = 1000;
// How long a call waits for ongoing lookups to end.
constexpr auto kPatience = std::chrono::milliseconds(10);

// Checks that both versions have the same tables, so that table numbers stay valid.
int check_same_tables(const std::string& path, const Version& before, const Version& now) {
  bool same = before.tables.size() == now.tables.size();
  for (size_t t = 0; same && t < now.tables.size(); ++t) {
    same = before.tables[t].dim == now.tables[t].dim &&
           std::string(before.tables[t].name) == now.tables[t].name;
  }
  if (same) return SK_OK;
  return fail(SK_BAD_ARGUMENT,
              "%s: has tables of other names or dims than the snapshot that follows the folder; "
              "close it and open the folder again",
              path.c_str());
}

int no_memory(const std::string& folder) {
  return fail(SK_NO_MEMORY, "%s: no memory to take over a version", folder.c_str());
}

}  // namespace

void Live::start(std::string folder, std::unique_ptr<SnapshotFile> file) {
  folder_ = std::move(folder);
  options_ = file->options;
  auto base = std::make_shared<Base>(std::move(file));
  for (const TableView& table : base->version.tables) names_.emplace_back(table.name);
  name_tables(base.get());
  Side& side = sides_[pins_.active()];
  versions_[pins_.active()] = side.version = base->version;
  side.base = std::move(base);
}

void Live::name_tables(Base* base) const {
  for (size_t t = 0; t < names_.size(); ++t) base->version.tables[t].name = names_[t].c_str();
}

int Live::follow(sk_progress* progress) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (folder_.empty()) {
    const int status = fail(
        SK_BAD_ARGUMENT, "sk_follow: %s was opened by its file; open the folder of the delta log",
        sides_[pins_.active()].base->file->path.c_str());
    return finish(status, {}, progress);
  }
  sk_progress done{};
  int status = SK_OK;
  Next next = Next::kAgain;
  const uint64_t at_first = newest().version;
  try {
    int listings = 0;
    for (int steps = 0; steps < kMostSteps && next != Next::kDone; ++steps) {
      next = Next::kDone;
      const int64_t before = done.deltas;
      status = step(&done, &next);
      listings = done.deltas > before ? 0 : listings + 1;
      if (next == Next::kListAgain && listings >= kMostListings) break;
      if (next != Next::kDone) continue;
      // The next call to follow() will apply the remaining versions.
      if (status == SK_BUSY && newest().version != at_first) status = SK_OK;
    }
  } catch (const std::bad_alloc&) {
    status = no_memory(folder_);
  }
  if (next == Next::kAgain) status = SK_OK;
  return finish(status, done, progress);
}

// Ends a call to follow() or apply(), and returns that call's status.
int Live::finish(int status, sk_progress done, sk_progress* progress) {
  parts_.clear();
  drop_unused();
  done.version = newest().version;
  if (progress != nullptr) {
    if (const int bad = write_struct(done, "sk_progress", progress)) return bad;
  }
  return status;
}

// If the folder contradicts itself, `next` is kListAgain and the status says how.
int Live::step(sk_progress* done, Next* next) {
  drop_unused();
  LogFolder log;
  if (const int status = log.read(folder_)) return status;
  const uint64_t in_use = sides_[pins_.active()].base->version.version;
  if (!log.has_base || log.newest_base < in_use) {
    // A new base may have appeared, and an old one vanished, while the folder was being listed.
    *next = Next::kListAgain;
    return fail(SK_GAP, "%s: %s, which is in use, is no longer there, and no newer base is",
                folder_.c_str(), base_name(in_use).c_str());
  }
  return log.newest_base > in_use ? rebase(log, done, next) : advance(log, done, next);
}

int Live::advance(const LogFolder& log, sk_progress* done, Next* next) {
  const uint64_t first = newest().version + 1;
  if (!log.is_complete(first)) {
    if (!log.has_complete_after(first)) return SK_OK;
    *next = Next::kListAgain;
    return fail(SK_GAP, "%s is missing, but later deltas are there",
                log.in_folder(log.missing(first)).c_str());
  }
  if (!wait_until_idle()) return busy();
  if (const int status = synchronise()) return status;
  Side& side = sides_[pins_.inactive()];
  Batch batch;
  batch.number = ++batches_;
  const int status = read_versions(log, first, &side, &batch, &broken_, next);
  if (broken_) {
    give_up(batch);
  } else if (batch.versions > 0) {
    publish(std::move(batch), done);
    if (status == SK_OK && *next == Next::kDone) *next = Next::kAgain;
  }
  return status;
}

int Live::rebase(const LogFolder& log, sk_progress* done, Next* next) {
  if (!wait_until_idle()) return busy();
  make_room_to_publish();
  std::shared_ptr<Base> base;
  if (const int status = open_base(log.newest_base, &base, next)) return status;
  Side side;
  if (const int status = begin_side(base, &side)) return status;
  Batch batch;
  batch.number = ++batches_;
  const uint64_t served = newest().version;
  bool broken = false;
  const int status = read_versions(log, served, &side, &batch, &broken, next);
  if (broken) return status;
  // Never go back to an older version: if a compacted base is older than the served version, the
  // folder has the deltas in between.
  if (side.version.version < served) {
    if (status != SK_OK || *next != Next::kDone) return status;
    *next = Next::kListAgain;
    const uint64_t missing = side.version.version + 1;
    return fail(SK_GAP, "%s is missing, which follows %s",
                log.in_folder(log.missing(missing)).c_str(), base_name(log.newest_base).c_str());
  }
  sides_[pins_.inactive()] = std::move(side);
  broken_ = false;
  publish(std::move(batch), done);
  if (status == SK_OK && *next == Next::kDone) *next = Next::kAgain;
  return status;
}

int Live::open_base(uint64_t version, std::shared_ptr<Base>* base, Next* next) {
  const std::string path = folder_ + "/" + base_name(version);
  std::unique_ptr<SnapshotFile> file;
  if (const int status = open_file(path, options_, &file)) {
    // A compaction may have replaced the file in the meantime.
    if (status == SK_IO_ERROR) *next = Next::kListAgain;
    return status;
  }
  *base = std::make_shared<Base>(std::move(file));
  const Version& opened = (*base)->version;
  if (opened.version != version) {
    return fail(SK_DAMAGED, "%s: is of version %" PRIu64 ", not of the one that its name says",
                path.c_str(), opened.version);
  }
  const uint64_t log_id = sides_[pins_.active()].base->log_id;
  if ((*base)->log_id != log_id) {
    return fail(SK_DAMAGED,
                "%s: belongs to log %016" PRIx64 ", but the snapshot to log %016" PRIx64,
                path.c_str(), (*base)->log_id, log_id);
  }
  if (const int status = check_same_tables(path, newest(), opened)) return status;
  name_tables(base->get());
  return SK_OK;
}

// Applies the next versions to a side; may stop early once it has reached version `least`.
int Live::read_versions(const LogFolder& log, uint64_t least, Side* side, Batch* batch,
                        bool* broken, Next* next) try {
  for (;;) {
    const uint64_t version = side->version.version + 1;
    if (!log.is_complete(version)) return SK_OK;
    if (version > least && batch->rows_written + batch->rows_erased >= kMostRowsTogether) {
      return SK_OK;
    }
    if (const int status = read_version(log, version, *side, next)) return status;
    const int status = apply_version(parts_, side, batch);
    if (status == SK_DAMAGED) *broken = true;
    if (status != SK_OK) return status;
  }
} catch (const std::bad_alloc&) {
  return no_memory(folder_);  // between two versions, so that those before it can be published
}

// Reads and checks all parts of a version.
int Live::read_version(const LogFolder& log, uint64_t version, const Side& side, Next* next) {
  const LogFolder::Parts& there = log.deltas.at(version);
  parts_.clear();
  for (const uint32_t rank : there.ranks) {
    DeltaFile& part = parts_.emplace_back();
    const std::string path = log.in_folder(delta_name(version, rank, there.num_ranks));
    bool missing;
    if (const int status = part.read(path, side.base->log_id, side.version.tables, &missing)) {
      if (missing) *next = Next::kListAgain;  // a compaction has removed it
      return status;
    }
    const DeltaHeader& header = part.header;
    if (header.version != version || header.rank != rank || header.num_ranks != there.num_ranks) {
      return fail(SK_DAMAGED,
                  "%s: holds version %" PRIu64 " of rank %u of %u, not what its name says",
                  path.c_str(), header.version, header.rank, header.num_ranks);
    }
  }
  return SK_OK;
}

int Live::apply(const char* const* paths, int32_t num_paths, sk_progress* progress) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (paths == nullptr) {
    return finish(fail(SK_BAD_ARGUMENT, "sk_apply: paths is null"), {}, progress);
  }
  if (num_paths <= 0) {
    return finish(fail(SK_BAD_ARGUMENT, "sk_apply: num_paths is %d", num_paths), {}, progress);
  }
  sk_progress done{};
  const auto take_over = [&]() -> int {
    const Side& active = sides_[pins_.active()];
    const uint64_t expected = active.version.version + 1;
    parts_.clear();
    std::vector<bool> ranks(num_paths);
    for (int32_t i = 0; i < num_paths; ++i) {
      if (paths[i] == nullptr) return fail(SK_BAD_ARGUMENT, "sk_apply: paths[%d] is NULL", i);
      DeltaFile& part = parts_.emplace_back();
      bool missing;
      if (const int status =
              part.read(paths[i], active.base->log_id, active.version.tables, &missing)) {
        return status;
      }
      const DeltaHeader& header = part.header;
      if (header.version != expected) {
        return fail(header.version > expected ? SK_GAP : SK_BAD_ARGUMENT,
                    "%s: holds version %" PRIu64 ", but the snapshot needs version %" PRIu64,
                    paths[i], header.version, expected);
      }
      if (header.num_ranks != static_cast<uint32_t>(num_paths) || ranks[header.rank]) {
        return fail(SK_BAD_ARGUMENT,
                    "%s: is of rank %u of %u; sk_apply needs one file of each rank, got %d files",
                    paths[i], header.rank, header.num_ranks, num_paths);
      }
      ranks[header.rank] = true;
    }
    if (!wait_until_idle()) return busy();
    if (const int status = synchronise()) return status;
    Batch batch;
    batch.number = ++batches_;
    const int status = apply_version(parts_, &sides_[pins_.inactive()], &batch);
    if (status == SK_DAMAGED) {
      broken_ = true;
      give_up(batch);
    }
    if (status == SK_OK) publish(std::move(batch), &done);
    return status;
  };
  int status;
  try {
    status = take_over();
  } catch (const std::bad_alloc&) {
    status = no_memory("sk_apply");
  }
  return finish(status, done, progress);
}

// Waits only briefly for lookups that are reading the inactive side, since a program may keep it
// pinned for a long time.
bool Live::wait_until_idle() const {
  const auto end = std::chrono::steady_clock::now() + kPatience;
  while (!pins_.idle(pins_.inactive())) {
    if (std::chrono::steady_clock::now() > end) return false;
    const timespec pause{0, 50000};
    ::nanosleep(&pause, nullptr);
  }
  return true;
}

int Live::busy() const {
  return fail(SK_BUSY, "version %" PRIu64 " is pinned; version %" PRIu64 " stays the newest",
              sides_[pins_.inactive()].version.version, newest().version);
}

// Brings the inactive side, which no lookup reads, to the version of the active one.
int Live::synchronise() {
  make_room_to_publish();
  const Side& active = sides_[pins_.active()];
  Side& side = sides_[pins_.inactive()];
  if (broken_) {
    if (const int status = copy_side(active, &side)) return status;
    broken_ = false;
  } else {
    if (side.base != active.base || side.indexes.empty()) {
      if (const int status = begin_side(active.base, &side)) return status;
      behind_ = true;
    }
    if (behind_) {
      const int status = replay(last_, active.version, &side);
      if (status == SK_DAMAGED) broken_ = true;
      if (status != SK_OK) return status;
    }
  }
  if (!active.indexes.empty()) active.base->drop_indexes();
  // Now neither side refers to the rows that the batch has replaced.
  give_back_left(last_, active.base.get());
  last_ = Batch();
  behind_ = false;
  return SK_OK;
}

// Reserves memory so that publish() cannot fail: a changed but unpublished side could not be told
// apart from one that lookups read. May throw std::bad_alloc. The inactive side must be idle.
void Live::make_room_to_publish() {
  versions_[pins_.inactive()].tables.reserve(newest().tables.size());
}

void Live::publish(Batch batch, sk_progress* done) {
  done->deltas += batch.versions;
  done->rows_written += batch.rows_written;
  done->rows_erased += batch.rows_erased;
  last_ = std::move(batch);
  behind_ = true;
  versions_[pins_.inactive()] = sides_[pins_.inactive()].version;
  pins_.publish(pins_.inactive());
}

// Frees the rows taken by a batch that no lookup will see.
void Live::give_up(const Batch& batch) {
  give_back_taken(batch, sides_[pins_.inactive()].base.get());
}

// Releases a base that only the inactive side still uses, once no lookup reads that side.
void Live::drop_unused() {
  Side& side = sides_[pins_.inactive()];
  if (side.base == nullptr || side.base == sides_[pins_.active()].base) return;
  if (!pins_.idle(pins_.inactive())) return;
  versions_[pins_.inactive()] = Version();
  side = Side();
}

}  // namespace sparsekit::serving
