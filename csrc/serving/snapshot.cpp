// Opens, describes, pins and closes snapshots.
#include <sys/stat.h>

#include <new>

#include "serving/handle.h"
#include "serving/log_folder.h"
#include "serving/message.h"
#include "serving/structs.h"

namespace sparsekit::serving {
namespace {

int open_folder(const std::string& folder, const sk_open_options& options,
                std::unique_ptr<SnapshotFile>* file) {
  std::string last;
  for (;;) {
    LogFolder log;
    if (int status = log.read(folder)) return status;
    if (!log.has_base) {
      return fail(
          SK_IO_ERROR,
          "%s: no base-*.sks in this folder, so it is not a delta log; a checkpoint must be "
          "exported first",
          folder.c_str());
    }
    const uint64_t version = log.newest_base;
    const std::string path = log.in_folder(base_name(version));
    const int status = open_file(path, options, file);
    if (status == SK_OK && (*file)->header.version != version) {
      return fail(SK_DAMAGED, "%s: the header says version %llu", path.c_str(),
                  static_cast<unsigned long long>((*file)->header.version));
    }
    // Compaction may have removed this base, after writing a newer one. List the folder again,
    // unless the file still exists.
    struct stat unused;
    if (status == SK_OK || path == last || stat(path.c_str(), &unused) == 0) return status;
    last = path;
  }
}

int open_snapshot(const char* path, const sk_open_options* given, sk_snapshot** snapshot) {
  sk_open_options options{};
  if (path == nullptr) return fail(SK_BAD_ARGUMENT, "sk_open: path is null");
  if (snapshot == nullptr) return fail(SK_BAD_ARGUMENT, "sk_open: snapshot is null");
  if (given != nullptr) {
    if (int status = read_struct(given, "sk_open_options", &options)) return status;
  }
  static std::atomic<uint64_t> last_number{0};
  auto opened = std::make_unique<sk_snapshot>();
  opened->number = ++last_number;
  opened->path = path;
  if (int status = choose_kernels(&opened->kernels)) return status;
  struct stat status;
  opened->is_folder = stat(path, &status) == 0 && S_ISDIR(status.st_mode);
  std::unique_ptr<SnapshotFile> file;
  if (int failed =
          opened->is_folder ? open_folder(path, options, &file) : open_file(path, options, &file)) {
    return failed;
  }
  opened->log_id = file->header.log_id;
  opened->live.start(opened->is_folder ? path : "", std::move(file));
  *snapshot = opened.release();
  return SK_OK;
}

int bad_table(const sk_snapshot* snapshot, const char* function, int32_t table, size_t tables) {
  return fail(SK_BAD_ARGUMENT, "%s: table is %d, but %s has %zu tables", function, table,
              snapshot->path.c_str(), tables);
}

}  // namespace

Reading::Reading(sk_snapshot* snapshot, const sk_pin* pin)
    : snapshot_(snapshot), own_(pin == nullptr) {
  if (own_) {
    pin_ = snapshot->pins.pin();
    return;
  }
  pin_ = {static_cast<uint32_t>(pin->internal[1]) & 1, 0};
  if (pin->internal[0] != snapshot->number || version().version != pin->version) {
    status_ = fail(SK_BAD_ARGUMENT, "%s: pin is not a pinned version of this snapshot",
                   snapshot->path.c_str());
  }
}

}  // namespace sparsekit::serving

using namespace sparsekit::serving;

int sk_open(const char* path, const sk_open_options* options, sk_snapshot** snapshot) {
  try {
    return open_snapshot(path, options, snapshot);
  } catch (const std::bad_alloc&) {
    return fail(SK_NO_MEMORY, "%s: no memory to open it", path);
  }
}

int sk_close(sk_snapshot* snapshot) {
  if (snapshot == nullptr) return SK_OK;
  if (!snapshot->pins.idle(0) || !snapshot->pins.idle(1)) {
    return fail(SK_BUSY, "%s: a version is pinned, or a lookup is running", snapshot->path.c_str());
  }
  delete snapshot;
  return SK_OK;
}

int sk_describe(sk_snapshot* snapshot, sk_info* info) {
  if (snapshot == nullptr) return fail(SK_BAD_ARGUMENT, "sk_describe: snapshot is null");
  if (info == nullptr) return fail(SK_BAD_ARGUMENT, "sk_describe: info is null");
  const Reading reading(snapshot, nullptr);
  const Version& version = reading.version();
  sk_info all{};
  all.log_id = snapshot->log_id;
  all.version = version.version;
  all.dense_version = version.dense_version;
  all.step = version.step;
  all.written_at = version.written_at;
  all.tables = static_cast<int32_t>(version.tables.size());
  return write_struct(all, "sk_info", info);
}

int sk_describe_table(sk_snapshot* snapshot, int32_t table, sk_table_info* info) {
  if (snapshot == nullptr) return fail(SK_BAD_ARGUMENT, "sk_describe_table: snapshot is null");
  if (info == nullptr) return fail(SK_BAD_ARGUMENT, "sk_describe_table: info is null");
  const Reading reading(snapshot, nullptr);
  const std::vector<TableView>& tables = reading.version().tables;
  if (table < 0 || static_cast<size_t>(table) >= tables.size()) {
    return bad_table(snapshot, "sk_describe_table", table, tables.size());
  }
  const TableView& of = tables[table];
  sk_table_info all{};
  all.name = of.name;
  all.rows = of.num_keys;
  all.dim = static_cast<int32_t>(of.dim);
  all.row_bytes = static_cast<int32_t>(of.row_bytes);
  all.row_format = of.row_format;
  all.miss = of.miss;
  all.combiner = of.combiner;
  all.has_padding_key = of.has_padding_key;
  all.padding_key = of.padding_key;
  return write_struct(all, "sk_table_info", info);
}

int sk_find_table(sk_snapshot* snapshot, const char* name, int32_t* table) {
  if (snapshot == nullptr) return fail(SK_BAD_ARGUMENT, "sk_find_table: snapshot is null");
  if (name == nullptr) return fail(SK_BAD_ARGUMENT, "sk_find_table: name is null");
  if (table == nullptr) return fail(SK_BAD_ARGUMENT, "sk_find_table: table is null");
  const Reading reading(snapshot, nullptr);
  const std::vector<TableView>& tables = reading.version().tables;
  for (size_t t = 0; t < tables.size(); ++t) {
    if (std::strcmp(tables[t].name, name) == 0) {
      *table = static_cast<int32_t>(t);
      return SK_OK;
    }
  }
  return fail(SK_BAD_ARGUMENT, "%s: no table is named \"%s\"", snapshot->path.c_str(), name);
}

int sk_pin_newest(sk_snapshot* snapshot, sk_pin* pin) {
  if (snapshot == nullptr) return fail(SK_BAD_ARGUMENT, "sk_pin_newest: snapshot is null");
  if (pin == nullptr) return fail(SK_BAD_ARGUMENT, "sk_pin_newest: pin is null");
  const Pins::Pin pinned = snapshot->pins.pin();
  const Version& version = snapshot->sides[pinned.side];
  pin->version = version.version;
  pin->dense_version = version.dense_version;
  pin->internal[0] = snapshot->number;
  pin->internal[1] = static_cast<uint64_t>(pinned.stripe) << 1 | pinned.side;
  return SK_OK;
}

int sk_unpin(sk_snapshot* snapshot, sk_pin* pin) {
  if (snapshot == nullptr) return fail(SK_BAD_ARGUMENT, "sk_unpin: snapshot is null");
  if (pin == nullptr) return fail(SK_BAD_ARGUMENT, "sk_unpin: pin is null");
  const auto side = static_cast<uint32_t>(pin->internal[1] & 1);
  const uint64_t stripe = pin->internal[1] >> 1;
  if (pin->internal[0] != snapshot->number || stripe >= Pins::kStripes) {
    return fail(SK_BAD_ARGUMENT, "%s: pin is not a pinned version of this snapshot",
                snapshot->path.c_str());
  }
  snapshot->pins.unpin({side, static_cast<uint32_t>(stripe)});
  *pin = sk_pin{};  // so that unpinning it again is an error
  return SK_OK;
}
