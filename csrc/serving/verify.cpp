#include "serving/verify.h"

#include <algorithm>
#include <utility>

#include "cpu/probe.h"
#include "serving/file_memory.h"
#include "serving/message.h"

namespace sparsekit::serving {
namespace {

using Range = std::pair<uint64_t, uint64_t>;  // begin and end in the file

int check_index(const char* path, const FileTable& table, const Bucket* buckets) {
  const char* name = table.name.c_str();
  const auto num_buckets = static_cast<int64_t>(table.record.num_buckets);
  const auto num_rows = static_cast<int64_t>(table.record.num_rows);
  std::vector<bool> seen(num_rows);
  int64_t keys = 0;
  for (int64_t b = 0; b < num_buckets; ++b) {
    const Bucket& bucket = buckets[b];
    const auto wrong = [=](const char* reason) {
      return fail(SK_DAMAGED, "%s: table \"%s\": bucket %lld of its index %s", path, name,
                  static_cast<long long>(b), reason);
    };
    if (bucket.spilled < 0) return wrong("has a negative count");
    const int used = cpu::first_empty_slot(bucket);
    for (int slot = used; slot < kSlotsPerBucket; ++slot) {
      if (bucket.rows[slot] != -1 || bucket.keys[slot] != 0) return wrong("has a gap");
    }
    for (int slot = 0; slot < used; ++slot) {
      const int64_t row = bucket.rows[slot], key = bucket.keys[slot];
      if (row >= num_rows) return wrong("has a row beyond the table");
      if (seen[row]) return wrong("has a row that another key has, too");
      seen[row] = true;
      const int64_t home = home_bucket(key, table.record.index_seed, num_buckets);
      if (cpu::find_from(buckets, num_buckets, home, key) != row) {
        return wrong("has a key that a search does not find");
      }
    }
    keys += used;
  }
  if (keys != num_rows) {
    return fail(SK_DAMAGED, "%s: table \"%s\": %lld rows, but its index has %lld keys", path, name,
                static_cast<long long>(num_rows), static_cast<long long>(keys));
  }
  return SK_OK;
}

int check_table(const SnapshotFile& file, const FileTable& table) {
  const char* path = file.path.c_str();
  const TableRecord& record = table.record;
  const auto wrong = [&](const char* section, uint32_t found, uint32_t expected) {
    return fail(SK_DAMAGED, "%s: table \"%s\": its %s have the checksum %08x, not %08x", path,
                table.name.c_str(), section, found, expected);
  };
  uint32_t crc = sk_crc32(0, table.index.data(), record.num_buckets * sizeof(Bucket));
  if (crc != record.index_crc) return wrong("buckets", crc, record.index_crc);
  crc = sk_crc32(0, table.rows.data(), record.num_rows * record.row_bytes);
  if (crc != record.rows_crc) return wrong("rows", crc, record.rows_crc);
  return check_index(path, table, static_cast<const Bucket*>(table.index.data()));
}

int check_zeros(const SnapshotFile& file, Range range) {
  std::vector<uint8_t> bytes(64 << 10);
  for (uint64_t at = range.first; at < range.second; at += bytes.size()) {
    const uint64_t size = std::min<uint64_t>(bytes.size(), range.second - at);
    if (int status = read_part(file, at, size, bytes.data())) return status;
    const auto end = bytes.begin() + static_cast<int64_t>(size);
    const auto bad = std::find_if(bytes.begin(), end, [](uint8_t byte) { return byte != 0; });
    if (bad != end) {
      return fail(SK_DAMAGED, "%s: the byte at %llu, between two sections, is not 0",
                  file.path.c_str(),
                  static_cast<unsigned long long>(at + static_cast<uint64_t>(bad - bytes.begin())));
    }
  }
  return SK_OK;
}

}  // namespace

int verify(const SnapshotFile& file) {
  std::vector<Range> used = {{0, kPage + file.header.directory_bytes}};
  for (const FileTable& table : file.tables) {
    if (int status = check_table(file, table)) return status;
    const TableRecord& of = table.record;
    used.emplace_back(of.index_offset, of.index_offset + of.num_buckets * sizeof(Bucket));
    used.emplace_back(of.rows_offset, of.rows_offset + of.num_rows * of.row_bytes);
  }
  used.emplace_back(file.header.file_bytes, file.header.file_bytes);
  std::sort(used.begin(), used.end());
  uint64_t end = 0;  // of the sections up to here; a table without rows has an empty one anywhere
  for (const Range& range : used) {
    if (range.first > end) {
      if (int status = check_zeros(file, {end, range.first})) return status;
    }
    end = std::max(end, range.second);
  }
  return SK_OK;
}

}  // namespace sparsekit::serving
